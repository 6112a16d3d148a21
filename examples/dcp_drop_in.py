"""torch.distributed.checkpoint as it is, with this storage under it: FSDP2, torch's helpers, and saves behind training.

torchrun --nproc-per-node 2 examples/dcp_drop_in.py runs/dcp --steps 200

Needs scikit-learn for its images: pip install 'lastgood[examples]'.
"""

import argparse

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import lastgood

parser = argparse.ArgumentParser()
parser.add_argument("run")
parser.add_argument("--steps", type=int, default=200)
options = parser.parse_args()

dist.init_process_group("gloo")
apart = dist.new_group(backend="gloo")  # for saves, whose collectives must not meet those of training
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
for layer in (model[0], model[2]):
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)


class Training:
    """Stateful, as torch knows it."""

    step = 0

    def state_dict(self):
        net, moments = get_state_dict(model, optimizer)
        return {"model": net, "optimizer": moments, "step": self.step}

    def load_state_dict(self, state):
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        self.step = state["step"]


digits = load_digits()
images = torch.tensor(digits.data, dtype=torch.float32) / 16
labels = torch.tensor(digits.target)
training, loss, saving = Training(), None, None

try:
    begun = bool(lastgood.open(options.run).generations())
except lastgood.errors.NotARun:  # the first start: nothing was saved so far
    begun = False
if begun:
    dcp.load({"training": training}, storage_reader=lastgood.dcp.Reader(options.run))
while training.step < options.steps:
    picked = torch.randint(len(images), (64,), generator=torch.Generator().manual_seed(training.step))
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(images[picked]), labels[picked])
    loss.backward()
    optimizer.step()
    training.step += 1
    if training.step % 20 == 0:
        if saving is not None:
            saving.result()  # raises what kept the last one from being committed
        saving = dcp.async_save(
            {"training": training},
            checkpoint_id=str(training.step),
            storage_writer=lastgood.dcp.Writer(options.run),
            process_group=apart,
        )
if saving is not None:
    saving.result()
if dist.get_rank() == 0:
    print(f"step {training.step}, loss {loss.item():.4f}" if loss is not None else "nothing left to do")
dist.destroy_process_group()
del apart  # with its last reference a gloo group joins its threads: none of them is left when Python ends
