"""Tensor parallel training: every process sees every sample, and holds a part of each layer.

torchrun --nproc-per-node 2 examples/tensor_parallel.py runs/tensor_parallel --steps 200

Needs scikit-learn for its images: pip install 'lastgood[examples]'.
"""

import argparse

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import lastgood

parser = argparse.ArgumentParser()
parser.add_argument("run")
parser.add_argument("--steps", type=int, default=200)
options = parser.parse_args()

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
parallelize_module(model, init_device_mesh("cpu", (world,)), {"0": ColwiseParallel(), "2": RowwiseParallel()})
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

digits = load_digits()
data = torch.utils.data.TensorDataset(torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target))
sampler = lastgood.ResumableSampler(len(data), global_batch=64, seed=0, rank=0, world_size=1)
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
