"""Networks of the shapes of ResNet-18 and ResNet-50, for small images, of any width."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from ..models import Bottleneck


class BasicBlock(nn.Module):
    """Two convolutions with a residual connection."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, width, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(width), nn.BatchNorm2d(width)])
        around = stride != 1 or channels != width
        self.around = (
            nn.Sequential(nn.Conv2d(channels, width, 1, stride, bias=False), nn.BatchNorm2d(width))
            if around
            else nn.Identity()
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = F.relu(self.norms[0](self.first(x)))
        return F.relu(self.norms[1](self.second(inner)) + self.around(x))


def network(model: str, width: int, classes: int) -> nn.Module:
    """`model`: "resnet18" or "resnet50". `width`: channels of the first stage, 64 in the published networks."""
    wide, counts = (1, (2, 2, 2, 2)) if model == "resnet18" else (4, (3, 4, 6, 3))
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    channels = width
    for stage, count in enumerate(counts):
        for at in range(count):
            stride = 2 if stage and not at else 1
            inner = width << stage
            layers.append((BasicBlock if wide == 1 else Bottleneck)(channels, inner, stride))
            channels = wide * inner
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))
