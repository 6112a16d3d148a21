"""Data parallel training that cannot be lost. Run it again and it goes on.

Any number of processes will do by which the 64 samples of a step divide.

torchrun --nproc-per-node 2 examples/ddp.py runs/ddp --steps 200

Needs scikit-learn for its images: pip install 'lastgood[examples]'.
"""

import argparse

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn

import lastgood

parser = argparse.ArgumentParser()
parser.add_argument("run")
parser.add_argument("--steps", type=int, default=200)
options = parser.parse_args()

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(
    nn.Sequential(nn.Linear(64, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Linear(256, 10))
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

digits = load_digits()
data = torch.utils.data.TensorDataset(torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target))
sampler = lastgood.ResumableSampler(len(data), global_batch=64, seed=0, rank=rank, world_size=world)
loader = sampler.loader(data)

state = {"model": model, "optimizer": optimizer, "sampler": sampler}
loss = None

with lastgood.Checkpointer(options.run, state, cadence=lastgood.Every(steps=20)) as ckpt:
    step = ckpt.restore().step
    while step < options.steps:
        for images, labels in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            step += 1
            ckpt.step(step)
            if step == options.steps:
                break
if rank == 0:
    print(f"step {step}, loss {loss.item():.4f}" if loss is not None else f"step {step}: nothing left to do")
dist.destroy_process_group()
