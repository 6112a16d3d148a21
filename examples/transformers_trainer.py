"""A `transformers.Trainer` that cannot lose its training. Kill it, run it again, and it goes on.

python examples/transformers_trainer.py runs/trainer
"""

import sys

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainerCallback, TrainingArguments

from lastgood.integrations.transformers import LastgoodCallback, LastgoodTrainerMixin


class MyTrainer(LastgoodTrainerMixin, Trainer):
    pass


class PrintLoss(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            print("step", state.global_step, "loss", logs["loss"], flush=True)


torch.manual_seed(0)
data = [{"input_ids": row, "labels": int(row.sum() % 2)} for row in torch.randint(0, 64, (72, 12))]
sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
model = BertForSequenceClassification(BertConfig(vocab_size=64, **sizes))
arguments = TrainingArguments(
    "trainer-out", num_train_epochs=8, per_device_train_batch_size=4, gradient_accumulation_steps=2, learning_rate=1e-3,
    logging_steps=1, save_strategy="no", report_to="none", disable_tqdm=True, use_cpu=True,
)  # fmt: skip
callbacks = [LastgoodCallback(sys.argv[1], every_steps=2), PrintLoss()]
trainer = MyTrainer(model, arguments, train_dataset=data, callbacks=callbacks)
trainer.train()
