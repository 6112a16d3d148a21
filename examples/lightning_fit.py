"""A Lightning training that cannot be lost. Kill it, run it again, and it goes on.

python examples/lightning_fit.py runs/lightning
"""

import sys

import lightning
import torch
from torch import nn

from lastgood.integrations.lightning import LastgoodCallback


class Net(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.2), nn.ReLU(), nn.Linear(32, 1))

    def training_step(self, batch, index):
        loss = nn.functional.mse_loss(self.layers(batch[0]), batch[1])
        print("step", f"{self.global_step} batch {index} loss", loss.item(), flush=True)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


lightning.seed_everything(0)
inputs = torch.randn(160, 8)
data = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))
loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)
model = Net()
trainer = lightning.Trainer(
    max_epochs=8, accumulate_grad_batches=2, accelerator="cpu", logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False, callbacks=[LastgoodCallback(sys.argv[1], every_steps=2)],
)  # fmt: skip
trainer.fit(model, loader)
