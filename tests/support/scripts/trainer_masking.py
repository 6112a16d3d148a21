"""A Trainer whose collator draws random masks; it logs every third step, evaluates, and has a counting callback."""

import sys

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed
from transformers.trainer_callback import ExportableState

from lastgood.integrations.transformers import LastgoodCallback, LastgoodTrainerMixin


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1))

    def forward(self, x, labels=None):
        return {"loss": torch.nn.functional.mse_loss(self.layers(x)[:, 0], labels)}


def mask(samples):
    batch = {name: torch.stack([one[name] for one in samples]) for name in samples[0]}
    batch["x"] = batch["x"] * (torch.rand(6) > 0.2)
    return batch


class Count(TrainerCallback, ExportableState):
    steps = 0

    def on_step_end(self, args, state, control, **kwargs):
        self.steps += 1

    def state(self):
        return {"args": {}, "attributes": {"steps": self.steps}}

    def on_log(self, args, state, control, logs=None, **kwargs):
        if value := logs.get("loss", logs.get("eval_loss")):
            print("step", state.global_step, "eval" if "eval_loss" in logs else "loss", self.steps, value, flush=True)


class MyTrainer(LastgoodTrainerMixin, Trainer):
    pass


set_seed(1)
x = torch.randn(42, 6)
data = [{"x": row, "labels": row.sum()} for row in x]
arguments = TrainingArguments(
    "out", num_train_epochs=12, per_device_train_batch_size=3, gradient_accumulation_steps=4, learning_rate=1e-2,
    lr_scheduler_type="cosine", train_sampling_strategy="random", accelerator_config={"use_seedable_sampler": False},
    logging_steps=3, eval_strategy="epoch", save_strategy="no", report_to="none", disable_tqdm=True, use_cpu=True,
)  # fmt: skip
trainer = MyTrainer(
    Net(), arguments, train_dataset=data, eval_dataset=data[:9], data_collator=mask,
    callbacks=[Count(), LastgoodCallback(sys.argv[1], every_steps=1, staging="blocking")],
)  # fmt: skip
trainer.train()
