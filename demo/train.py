"""Train a small convolutional network on scikit-learn's digits. Kill it at any instant and start it again: it goes on.

    python demo/train.py runs/digits --log digits.jsonl

This is what a training script that uses lastgood looks like. It holds no word about crashes: what to save is named once
(`state`), where to begin is asked once (`restore`), each step is told (`step`). The loop itself is deterministic, so a
run that was killed ends with the same bits as one that was not.
"""

from __future__ import annotations

import argparse
import json
import random
from dataclasses import asdict
from itertools import chain, repeat

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

import lastgood

BATCH = 64
SAVE_EVERY_STEPS = 4


class Digits(Dataset):
    """1,797 images of 8 x 8 pixels; each is turned, scaled and shifted at random every time that it is fetched.

    A sample is (image float32 [1, 8, 8] in [0, 1], label, id). The id tells the audit which sample this was.
    """

    def __init__(self) -> None:
        pixels, labels = load_digits(return_X_y=True)
        self.images = torch.tensor(pixels / 16, dtype=torch.float32).view(-1, 1, 8, 8)
        self.labels = labels.tolist()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int, int]:
        angle, scale = random.uniform(-0.3, 0.3), random.uniform(0.85, 1.15)
        turned = scale * torch.tensor([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
        shift = torch.empty(2, 1).uniform_(-0.15, 0.15)
        grid = F.affine_grid(torch.cat([turned, shift], 1).float()[None], [1, 1, 8, 8], align_corners=False)
        return F.grid_sample(self.images[i][None], grid, align_corners=False)[0], self.labels[i], i


def network() -> nn.Module:
    """185 k parameters, with batch-norm statistics and dropout: state and randomness beyond the weights."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Dropout(0.25),
        nn.Linear(64 * 4 * 4, 160), nn.ReLU(), nn.Dropout(0.5),
        nn.Linear(160, 10),
    )  # fmt: skip


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("run", help="directory of the run")
    options.add_argument("--log", required=True, help="file that gets a line of JSON for each step")
    options.add_argument("--epochs", type=int, default=10)
    args = options.parse_args()

    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)

    digits = Digits()
    sampler = lastgood.ResumableSampler(len(digits), global_batch=BATCH, seed=0)
    loader = sampler.loader(digits, num_workers=2, persistent_workers=True)
    batches = chain.from_iterable(repeat(loader))  # epoch after epoch
    total = args.epochs * sampler.steps_per_epoch

    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=total)
    audit = lastgood.Audit()
    losses = torch.zeros(total)
    state = {
        "model": model, "optimizer": optimizer, "scheduler": scheduler, "sampler": sampler, "audit": audit,
        "losses": losses,
    }  # fmt: skip

    with open(args.log, "a", buffering=1) as log:  # a line at a time, so that a kill leaves whole lines

        def tell(event: str, **what: object) -> None:
            print(json.dumps({"event": event, **what}), file=log)

        with lastgood.Checkpointer(args.run, state, cadence=lastgood.Every(steps=SAVE_EVERY_STEPS)) as ckpt:
            restored = ckpt.restore()
            tell("restored", step=restored.step, stepped_over=restored.stepped_over, seconds=restored.seconds)
            for step in range(restored.step, total):
                images, labels, ids = next(batches)
                audit.observe(*sampler.position, ids)
                loss = F.cross_entropy(model(images), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                scheduler.step()
                losses[step] = loss.detach()
                tell("step", step=step + 1, epoch=step // sampler.steps_per_epoch, loss=losses[step].item())
                ckpt.step(step + 1)
        tell("finished", step=total, **asdict(audit.report(sampler)))


if __name__ == "__main__":
    main()
