"""A Lightning training that validates twice per epoch, with schedules and callbacks that depend on the validation,
and with running metrics."""

import sys

import lightning
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torchmetrics import MeanAbsoluteError

from lastgood.integrations.lightning import LastgoodCallback


class Noisy(torch.utils.data.Dataset):
    def __init__(self, size):
        self.inputs = torch.randn(size, 4)

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        return self.inputs[index] + 0.1 * torch.randn(4), self.inputs[index].sum()


class Net(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))
        self.error = MeanAbsoluteError()
        self.average = 0.0

    def training_step(self, batch, index):
        inputs, targets = batch
        found = self.layers(inputs)[:, 0]
        loss = torch.nn.functional.mse_loss(found, targets)
        self.log("loss", loss, on_epoch=True)
        self.log("worst", loss, on_step=False, on_epoch=True, reduce_fx="max")
        self.log("error", self.error(found, targets), on_step=False, on_epoch=True)
        self.average += float(loss)
        print("step", self.global_step, "batch", index, "loss", loss.item(), flush=True)
        return loss

    def validation_step(self, batch, index):
        self.log("val", torch.nn.functional.mse_loss(self.layers(batch[0])[:, 0], batch[1]))

    def on_validation_epoch_end(self):
        if not self.trainer.sanity_checking:
            print("step", self.global_step, "val", self.trainer.callback_metrics["val"].item(), flush=True)

    def on_train_epoch_end(self):
        print("step", self.global_step, "absolute", self.error.compute().item(), flush=True)
        self.error.reset()

    def on_train_epoch_start(self):
        if self.current_epoch and self.global_step % 9 == 0:  # not after a restart in the middle of an epoch of 9 steps
            seen = self.trainer.callback_metrics
            print("step", self.global_step, "means", *(seen[name].item() for name in ("loss", "worst", "error")))

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.7, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val", "interval": "epoch"}}

    def on_save_checkpoint(self, checkpoint):
        checkpoint["average"] = self.average

    def on_load_checkpoint(self, checkpoint):
        self.average = checkpoint["average"]


lightning.seed_everything(3)
loader = torch.utils.data.DataLoader(Noisy(36), batch_size=4, shuffle=True)
validation = torch.utils.data.DataLoader(Noisy(8), batch_size=4)
stopping = EarlyStopping("val", patience=100)
files = ModelCheckpoint("files-" + sys.argv[1].rpartition("/")[2], monitor="val", save_top_k=1)
model = Net()
trainer = lightning.Trainer(
    max_epochs=6, val_check_interval=0.5, accelerator="cpu", logger=False, log_every_n_steps=1,
    enable_progress_bar=False, enable_model_summary=False,
    callbacks=[stopping, files, LastgoodCallback(sys.argv[1], every_steps=1, staging="blocking")],
)  # fmt: skip
trainer.fit(model, loader, validation)
