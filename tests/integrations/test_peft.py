"""PEFT: models with adapters resume exactly; state that the weights do not contain is stored or refused by name."""

import pytest

pytest.importorskip("peft", reason="peft is not installed")

import peft
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

import lastgood
from lastgood.errors import Refused, StateMismatch, Unstorable
from lastgood.integrations.peft import Adapters
from lastgood.integrations.transformers import LastgoodCallback, LastgoodTrainerMixin

pytestmark = pytest.mark.slow


def lora(**options):
    plain = {"r": 4, "lora_dropout": 0.2, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}
    return peft.LoraConfig(**plain | options)


def adalora():
    ranks = {"init_r": 6, "target_r": 2, "total_step": 8, "tinit": 1, "tfinal": 1, "deltaT": 1}
    return peft.AdaLoraConfig(target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", **ranks)


def base(tied=False):
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "tie_word_embeddings": tied}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads))


def job(config=None, tied=False, seed=0, second=False, adapters=False):
    """The state of a new fine-tuning. A different seed stands for a new process: everything must come from the run."""
    torch.manual_seed(seed)
    model = peft.get_peft_model(base(tied), config or lora())
    if second:
        model.add_adapter("second", lora())
    trained = [one for name, one in model.named_parameters() if one.requires_grad or "second" in name]
    state = {"model": model.train(), "optimizer": torch.optim.AdamW(trained, 1e-2)}
    return state | ({"adapters": Adapters(model)} if adapters else {})


def train(state, steps, ckpt=None, after=lambda step, model: None):
    """Train these steps, each on a batch that its number determines; returns the losses."""
    losses = []
    for step in steps:
        tokens = torch.randint(0, 64, (2, 8), generator=torch.Generator().manual_seed(step))
        loss = state["model"](input_ids=tokens, labels=tokens).loss
        loss.backward()
        state["optimizer"].step()
        after(step + 1, state["model"])
        state["optimizer"].zero_grad()
        losses.append(loss.item())
        if ckpt is not None:
            ckpt.step(step + 1)
    return losses


def opened(path, state, **options):
    return lastgood.Checkpointer(path, state, cadence=lastgood.Every(steps=1), **options)


def resumed(path, build, **options):
    """The losses of 8 steps with an interruption, and those of 8 steps without. `options`: for `build` and the
    training."""
    after = options.pop("after", lambda step, model: None)
    losses = []
    for seed, steps in ((0, range(4)), (3, range(4, 8))):
        state = build(seed=seed)
        torch.manual_seed(seed)
        with opened(path, state) as ckpt:
            assert ckpt.restore().step == steps.start
            losses += train(state, steps, ckpt, after)
    whole = build(seed=0)
    torch.manual_seed(0)
    return losses, train(whole, range(8), after=after)


KINDS = {
    "lora": {},
    "dora": {"config": lora(use_dora=True)},
    "head trained in full": {"config": lora(modules_to_save=["lm_head"])},
    "head and embedding trained in full, tied": {
        "config": lora(modules_to_save=["embed_tokens"], ensure_weight_tying=True),
        "tied": True,
    },
    "adapters on tied embeddings": {"config": lora(target_modules=["q_proj", "embed_tokens"]), "tied": True},
    "some tokens trained": {"config": lora(trainable_token_indices=[1, 2]), "tied": True},
    "prompt": {"config": peft.PromptTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM")},
}


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning:peft")
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
def test_a_fine_tuning_with_adapters_resumes_exactly(kind, tmp_path):
    losses, uninterrupted = resumed(tmp_path / "run", lambda seed: job(**kind, seed=seed))
    assert losses == uninterrupted


# ---- adapters alone ---------------------------------------------------------------------------------------------


def test_adapters_alone_are_saved_and_loaded_onto_the_same_base(tmp_path):
    state = job()
    with opened(tmp_path / "run", state, include=["*lora*"]) as ckpt:
        ckpt.restore()
        train(state, range(3), ckpt)
    kept = lastgood.load(tmp_path / "run", include=["model"])["model"]
    assert len(kept) == 4 and all("lora" in name for name in kept)
    other = job()
    lastgood.load(tmp_path / "run", {"model": other["model"]}, include=["*lora*"])
    ours, theirs = state["model"].state_dict(), other["model"].state_dict()
    assert all(torch.equal(theirs[name], one) for name, one in ours.items())


def test_a_pattern_without_a_match_is_refused_with_the_adapter_pattern(tmp_path):
    """`include=["lora"]` matched no name: every save held nothing but random numbers, and was verified as good."""
    refused = pytest.raises(Refused, match=r"include=\['lora'\] matches no name. Similar: '\*lora\*'")
    with refused, opened(tmp_path / "run", state := job(), include=["lora"]) as ckpt:
        ckpt.restore()
        train(state, range(1), ckpt)


# ---- state that the weights do not contain ----------------------------------------------------------------------


def test_a_model_with_merged_adapters_is_not_saved(tmp_path):
    """After a save that followed merge_adapter(), and a restore, the adapters were applied twice, because the base
    contained them already."""
    state = job()
    with opened(tmp_path / "run", state) as ckpt:
        ckpt.restore()
        train(state, range(2), ckpt)
        state["model"].merge_adapter()
        with pytest.raises(Unstorable, match=r"model has adapters merged into its weights \(default\).*unmerge"):
            ckpt.save(3)
        state["model"].unmerge_adapter()
        assert ckpt.save(3).result().step == 3


def test_nothing_is_loaded_into_a_model_with_merged_adapters(tmp_path):
    """The next unmerge_adapter() subtracted the restored adapters from a base to which they had never been added."""
    state = job()
    with opened(tmp_path / "run", state) as ckpt:
        ckpt.restore()
        train(state, range(2), ckpt)
    other = job()
    other["model"].merge_adapter()
    before = [one.clone() for one in other["model"].state_dict().values()]
    with pytest.raises(StateMismatch, match=r"model: adapters are merged into its weights here \(default\)"):
        lastgood.load(tmp_path / "run", other)
    assert all(map(torch.equal, other["model"].state_dict().values(), before))


@pytest.mark.parametrize("added_to", ["the run", "the model"])
def test_an_adapter_present_on_only_one_side_is_named(added_to, tmp_path):
    with opened(tmp_path / "run", state := job(second=added_to == "the run")) as ckpt:
        ckpt.restore()
        train(state, range(1), ckpt)
    with pytest.raises(StateMismatch, match=r"q_proj\.lora_A\.second\.weight"):
        lastgood.load(tmp_path / "run", job(second=added_to == "the model"))


def switch(step, model):
    if step == 2:
        model.set_adapter("second")


def test_an_adapter_activated_during_training_is_active_after_a_restore(tmp_path):
    """After set_adapter() at step 2 and a restore of step 4, training continued with the first adapter, and nothing
    reported it."""
    build = lambda seed: job(second=True, adapters=True, seed=seed)  # noqa: E731
    losses, uninterrupted = resumed(tmp_path / "run", build, after=switch)
    assert losses == uninterrupted


@pytest.mark.filterwarnings("ignore:Already found a `peft_config` attribute:UserWarning:peft")
@pytest.mark.parametrize("active", [["second"], ["default", "second"]])
@pytest.mark.parametrize("native", [False, True], ids=["of PEFT", "of transformers"])
def test_a_restore_activates_every_adapter_that_was_active(native, active, tmp_path):
    def made():
        model = base() if native else job()["model"]
        for name in ("default", "second") if native else ("second",):
            model.add_adapter(lora(), name) if native else model.add_adapter(name, lora())
        (model if native else model.base_model).set_adapter(["default"])
        return model

    saved, live = made(), made()
    (saved if native else saved.base_model).set_adapter(active)
    lastgood.save(tmp_path, {"adapters": Adapters(saved)})
    lastgood.load(tmp_path, {"adapters": Adapters(live)})
    trained = [[name for name, one in model.named_parameters() if one.requires_grad] for model in (saved, live)]
    assert trained[0] == trained[1] and any("second" in name for name in trained[0])


def test_an_unstored_change_of_the_active_adapter_is_refused(tmp_path):
    refused = pytest.raises(Unstorable, match=r"other active adapters.*integrations\.peft\.Adapters\(model\)")
    with refused, opened(tmp_path / "run", state := job(second=True)) as ckpt:
        ckpt.restore()
        train(state, range(3), ckpt, switch)


def allocate(step, model):
    if step < 8:
        model.base_model.update_and_allocate(step)


def test_adalora_resumes_exactly_with_its_rank_importance(tmp_path):
    """The averages that decide which ranks are pruned started at 0 after a restore, so other ranks were pruned."""
    build = lambda seed: job(adalora(), adapters=True, seed=seed)  # noqa: E731
    losses, uninterrupted = resumed(tmp_path / "run", build, after=allocate)
    assert losses == uninterrupted


def test_adalora_without_its_rank_importance_is_refused(tmp_path):
    refused = pytest.raises(Unstorable, match=r"AdaLoRA.*integrations\.peft\.Adapters\(model\)")
    with refused, opened(tmp_path / "run", state := job(adalora())) as ckpt:
        ckpt.restore()
        train(state, range(1), ckpt)


class Interrupted(TrainerCallback):
    """A callback that gives AdaLoRA its budget, and interrupts the first training after step 5."""

    def __init__(self, first):
        self.first = first

    def on_optimizer_step(self, args, state, control, model=None, **kwargs):
        if isinstance(model.base_model, peft.AdaLoraModel):
            allocate(state.global_step + 1, model)

    def on_step_begin(self, args, state, control, **kwargs):
        if self.first and state.global_step == 5:
            raise KeyboardInterrupt


class MyTrainer(LastgoodTrainerMixin, Trainer):
    pass


def trainer(path, config, seed, first=False):
    tokens = torch.randint(0, 64, (16, 8), generator=torch.Generator().manual_seed(0))
    arguments = TrainingArguments(
        str(path), per_device_train_batch_size=2, num_train_epochs=1, learning_rate=1e-2, use_cpu=True,
        logging_steps=1, save_strategy="no", report_to="none", disable_tqdm=True,
    )  # fmt: skip
    return MyTrainer(
        job(config, seed=seed)["model"],
        arguments,
        train_dataset=[{"input_ids": row, "labels": row} for row in tokens],
        callbacks=[Interrupted(first), LastgoodCallback(path, every_steps=1)],
    )


@pytest.mark.parametrize("config", [lora, adalora])
def test_a_trainer_resumes_adapters_exactly(config, tmp_path):
    """The callback builds the state of a Trainer, so a user could not add the entry that AdaLoRA needs."""
    with pytest.raises(KeyboardInterrupt):
        trainer(tmp_path / "run", config(), 0, first=True).train()
    losses = []
    for run, seed in (("run", 3), ("calm", 0)):
        one = trainer(tmp_path / run, config(), seed)
        one.train()
        losses.append([entry["loss"] for entry in one.state.log_history if "loss" in entry])
    assert losses[0] == losses[1] and len(losses[0]) == 8


def test_adapters_of_a_model_without_any_are_refused():
    with pytest.raises(Refused, match="Linear, which has no adapters"):
        Adapters(torch.nn.Linear(2, 2))
