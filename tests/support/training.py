"""A small training job for tests of whole runs."""

from __future__ import annotations

import torch


class Training:
    """A small model with its optimizer; each step changes every number."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Linear(40, 30)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.state = {"model": self.model, "optimizer": self.optimizer}

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(4, 40)).square().sum().backward()
        self.optimizer.step()

    def weights(self) -> list[float]:
        return self.model.weight.flatten().tolist()
