"""Networks with the shapes of well-known models, which the benchmarks train on random data without any download.

At scale 1 they have the published numbers of parameters, which tests check: GPT-2 124,439,808, OPT-125M 125,239,296,
BERT-base 109,482,240, VGG-16 138,357,544, ResNet-50 25,557,032. A scale below 1 makes the layers narrower.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import nn
from torch.nn import functional as F

Batch = tuple[torch.Tensor, torch.Tensor]


class Shape(NamedTuple):
    """The properties in which the three transformers differ."""

    vocabulary: int
    positions: int
    causal: bool
    bert: bool
    """layer norms follow the residual sums, and there are segment embeddings and a pooler"""


class Block(nn.Module):
    """One transformer layer: attention and a feed-forward network."""

    def __init__(self, width: int, heads: int, causal: bool, norm_first: bool) -> None:
        super().__init__()
        self.heads, self.causal, self.norm_first = heads, causal, norm_first
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.c_fc, self.mlp_proj = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.norm_first:
            x = x + self._attend(self.ln_1(x))
            return x + self.mlp_proj(F.gelu(self.c_fc(self.ln_2(x))))
        x = self.ln_1(x + self._attend(x))
        return self.ln_2(x + self.mlp_proj(F.gelu(self.c_fc(x))))

    def _attend(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        q, k, v = self.c_attn(x).view(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.c_proj(mixed.transpose(1, 2).reshape(rows, length, width))


class Transformer(nn.Module):
    """GPT-2, OPT or BERT: embeddings, twelve blocks, a head tied to the token embedding. `forward` returns the loss."""

    def __init__(self, shape: Shape, scale: float) -> None:
        super().__init__()
        width = _narrow(768, scale, 12)
        self.tokens = nn.Embedding(max(256, int(shape.vocabulary * math.sqrt(scale))), width)
        self.positions = nn.Embedding(shape.positions, width)
        self.segments = nn.Embedding(2, width) if shape.bert else None
        self.h = nn.ModuleList(Block(width, 12, shape.causal, not shape.bert) for _ in range(12))
        self.norm = nn.LayerNorm(width)
        self.pooler = nn.Linear(width, width) if shape.bert else None

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        if self.segments is not None:
            x = self.norm(x + self.segments.weight[0])
        for block in self.h:
            x = block(x)
        if self.pooler is None:
            x = self.norm(x)
        loss = F.cross_entropy(F.linear(x, self.tokens.weight).flatten(0, 1), targets.flatten())
        return loss if self.pooler is None else loss + torch.tanh(self.pooler(x[:, 0])).square().mean()


class Vgg16(nn.Module):
    """Thirteen convolutions and three wide linear layers, of which two matrices hold most of a save's bytes."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 3
        for width, count in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
            for _ in range(count):
                layers += [nn.Conv2d(channels, channels := _narrow(width, scale, 4), 3, padding=1), nn.ReLU(True)]
            layers.append(nn.MaxPool2d(2))
        wide = _narrow(4096, scale, 4)
        self.features = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(7), nn.Flatten())
        first, second = nn.Linear(49 * channels, wide), nn.Linear(wide, wide)
        self.classifier = nn.Sequential(first, nn.ReLU(True), second, nn.ReLU(True), nn.Linear(wide, 1000))

    def forward(self, images: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.classifier(self.features(images)), targets)


class Bottleneck(nn.Module):
    """Three convolutions with a residual connection."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        wide = 4 * width
        self.way = nn.Sequential(
            *_convolution(channels, width, 1, 1),
            *_convolution(width, width, 3, stride),
            *_convolution(width, wide, 1, 1),
        )[:-1]
        around = stride != 1 or channels != wide
        self.around = nn.Sequential(*_convolution(channels, wide, 1, stride)[:-1]) if around else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.way(x) + self.around(x))


class ResNet50(nn.Module):
    """ResNet-50: many small tensors, and batch norms whose buffers change in the forward pass."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        channels = _narrow(64, scale, 4)
        layers: list[nn.Module] = [*_convolution(3, channels, 7, 2), nn.MaxPool2d(3, 2, 1)]
        for width, count, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
            width = _narrow(width, scale, 4)
            for at in range(count):
                layers.append(Bottleneck(channels, width, stride if at == 0 else 1))
                channels = 4 * width
        self.body = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 1000))

    def forward(self, images: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.body(images), targets)


def _convolution(channels: int, width: int, side: int, stride: int) -> list[nn.Module]:
    convolution = nn.Conv2d(channels, width, side, stride, side // 2, bias=False)
    return [convolution, nn.BatchNorm2d(width), nn.ReLU(True)]


def _narrow(width: int, scale: float, unit: int) -> int:
    """A width, as a multiple of `unit`, with which the number of parameters shrinks by about `scale`."""
    return max(unit, round(width * math.sqrt(scale) / unit) * unit)


def _tokens(vocabulary: int, rows: int, length: int, most: int) -> Callable[[float, float], Batch]:
    def made(scale: float, work: float) -> Batch:
        known = max(256, int(vocabulary * math.sqrt(scale)))
        shape = (rows, min(most, max(8, int(length * work))))
        return torch.randint(known, shape), torch.randint(known, shape)

    return made


def _images(rows: int, side: int) -> Callable[[float, float], Batch]:
    def made(scale: float, work: float) -> Batch:
        wide = max(64, int(side * math.sqrt(work)))
        return torch.randn(rows, 3, wide, wide), torch.randint(1000, (rows,))

    return made


class Model(NamedTuple):
    """How to build a network of a scale, and its batch for a scale and a share of the full work."""

    build: Callable[[float], nn.Module]
    batch: Callable[[float, float], Batch]


MODELS: dict[str, Model] = {
    "gpt2-124m": Model(lambda s: Transformer(Shape(50257, 1024, True, False), s), _tokens(50257, 4, 256, 1024)),
    "opt-125m": Model(lambda s: Transformer(Shape(50272, 2050, True, False), s), _tokens(50272, 4, 256, 1024)),
    "bert-base": Model(lambda s: Transformer(Shape(30522, 512, False, True), s), _tokens(30522, 4, 256, 512)),
    "vgg16": Model(Vgg16, _images(4, 224)),
    "resnet50": Model(ResNet50, _images(8, 224)),
}


class Trained(Protocol):
    """A module and its optimizer, whose state each step changes."""

    module: nn.Module
    optimizer: torch.optim.Optimizer

    def step(self, fence: Callable[[], None]) -> None: ...
    def tensors(self) -> dict[str, torch.Tensor]: ...


class Plain:
    """`total_bytes` of fp32 tensors, of 64 MiB each except the last. A step changes all of them."""

    def __init__(self, total_bytes: int, device: str = "cpu") -> None:
        whole, rest = divmod(total_bytes // 4, 16 << 20)
        lengths = [16 << 20] * whole + [rest] * (rest > 0)
        self.module: nn.Module = nn.ParameterDict(
            {f"part{at}": nn.Parameter(torch.randn(length, device=device)) for at, length in enumerate(lengths)}
        )
        self.optimizer: torch.optim.Optimizer = torch.optim.SGD(self.module.parameters(), lr=1.0)

    def step(self, fence: Callable[[], None]) -> None:
        fence()
        with torch.no_grad():
            for one in self.module.parameters():
                one.mul_(1.001)

    def tensors(self) -> dict[str, torch.Tensor]:
        return {f"model.{name}": one for name, one in self.module.state_dict().items()}


class Workload:
    """A network with its AdamW optimizer and one batch, on which every step trains.

    `work` is the number of tokens or pixels as a share of the model's standard batch; a smaller one shortens the steps.
    """

    def __init__(self, name: str, scale: float, work: float, device: str = "cpu") -> None:
        torch.manual_seed(1)
        with torch.device(device):
            self.module: nn.Module = MODELS[name].build(scale)
            self._batch = MODELS[name].batch(scale, work)
        # The tiny learning rate keeps the network from learning its only batch: gradients and moments would become
        # denormal, and a step would take four times as long.
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(self.module.parameters(), lr=1e-8)
        self.device = torch.device(device)
        self.step(lambda: None)  # creates the optimizer's state

    def step(self, fence: Callable[[], None]) -> None:
        """Run forward and backward, call `fence()`, and update. On return all of it is completed, on a GPU too."""
        loss = self.module(*self._batch)
        loss.backward()
        fence()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return every tensor that a save must hold, by name: parameters, buffers and optimizer state."""
        found = {f"model.{name}": one for name, one in self.module.state_dict().items()}
        names = {id(one): name for name, one in self.module.named_parameters()}
        for parameter, state in self.optimizer.state.items():
            for key, one in state.items():
                found[f"optimizer.{names[id(parameter)]}.{key}"] = one
        return found

    def buffers(self) -> set[str]:
        """Return the names of the tensors that the forward pass may change."""
        return {f"model.{name}" for name, _ in self.module.named_buffers()}
