"""A loop over accelerate that cannot be lost. Kill it, run it again, and it goes on.

python examples/accelerate_loop.py runs/loop
"""

import sys

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn

from lastgood.integrations.accelerate import Checkpointer

set_seed(0)
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
model = nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.2), nn.ReLU(), nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=80)
inputs = torch.randn(160, 8)
data = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))
loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)
model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)

with Checkpointer(accelerator, sys.argv[1], every_steps=2) as ckpt:
    step = ckpt.restore().step
    for _ in range(ckpt.epoch, 8):
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(x), y)
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                step += 1
                print("step", step, "loss", loss.item(), flush=True)
                ckpt.step(step)
