"""OffloadAdamW under transformers' Trainer.

Its clipping and its logged norm, accumulation, bf16, and exact resumption.
"""

import gc
import types

import pytest
import stepwell
import torch
from insides import forwards_wait
from offload_cases import loss_of, pair
from optim_cases import bits
from stepwell.offload import offload_trainer

transformers = pytest.importorskip("transformers")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

STEPS = 6
VOCAB = 64


class Tokens(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        ids = torch.randint(VOCAB, (16,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}


def llama(dtype):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=VOCAB,
        max_position_embeddings=32,
        tie_word_embeddings=True,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config).to(dtype)


def trainer_of(
    folder,
    kind=stepwell.OffloadAdamW,
    dtype=torch.float32,
    folded=True,
    gives_model=True,
    options=None,
    **arguments,
):
    model = llama(dtype)
    is_given = gives_model and kind is stepwell.OffloadAdamW
    params = model if is_given else model.named_parameters()
    optimizer = kind(params, lr=1e-2, weight_decay=0.0, **(options or {}))
    arguments = {
        "max_steps": STEPS,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "logging_steps": 1,
        "save_strategy": "no",
        "max_grad_norm": 0.5,
        "lr_scheduler_type": "linear",
        "warmup_steps": 2,
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "seed": 3,
    } | arguments
    trainer = transformers.Trainer(
        model=model,
        args=transformers.TrainingArguments(output_dir=str(folder), **arguments),
        train_dataset=Tokens(),
        eval_dataset=torch.utils.data.Subset(Tokens(), range(8)),
        optimizers=(optimizer, None),
    )
    if folded and kind is stepwell.OffloadAdamW:
        offload_trainer(trainer)
    return trainer, optimizer


def logged(trainer, name):
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def params_of(trainer):
    return [bits(param) for param in trainer.model.parameters()]


KINDS = [(torch.float32, False), (torch.float32, True), (torch.bfloat16, False)]
KIND_IDS = ["fp32", "fp32-autocast", "pure-bf16"]


@pytest.mark.parametrize(("dtype", "bf16"), KINDS, ids=KIND_IDS)
@pytest.mark.parametrize(
    "options",
    [{}, {"accumulation_steps": 2}, {"accumulate": "host"}],
    ids=["untold", "told", "host"],
)
def test_clips_and_logs_as_trainer_does(tmp_path, dtype, bf16, options):
    trainer, optimizer = trainer_of(tmp_path, dtype=dtype, bf16=bf16, options=options)
    norms = []
    optimizer.register_step_post_hook(lambda *_: norms.append(optimizer.grad_norm))
    trainer.train()
    assert forwards_wait(optimizer)
    assert optimizer.clip_norm == 0.5
    assert max(norms) > 0.5
    assert logged(trainer, "grad_norm") == [pytest.approx(norm) for norm in norms]
    # With clipping by torch: rounding apart the same.
    theirs, _ = trainer_of(tmp_path, stepwell.AdamW, dtype=dtype, bf16=bf16)
    theirs.train()
    assert logged(trainer, "loss") == pytest.approx(logged(theirs, "loss"), rel=1e-2)
    # torch's norm of bfloat16 gradients is rounded to bfloat16.
    assert norms == pytest.approx(
        logged(theirs, "grad_norm"), rel=1e-2 if dtype == torch.bfloat16 else 1e-3
    )


@pytest.mark.parametrize("told", [None, 2], ids=["untold", "told"])
def test_trainers_own_clipping_is_stepped_bit_for_bit(tmp_path, told):
    trainer, optimizer = trainer_of(tmp_path, folded=False, options={"accumulation_steps": told})
    trainer.train()
    assert optimizer.clip_norm is None
    assert optimizer.grad_norm == pytest.approx(0.5, rel=1e-3)
    theirs, _ = trainer_of(tmp_path, stepwell.AdamW)
    theirs.train()
    optimizer.synchronize()
    assert logged(trainer, "loss") == logged(theirs, "loss")
    assert logged(trainer, "grad_norm") == logged(theirs, "grad_norm")
    assert all(
        torch.equal(one, other)
        for one, other in zip(params_of(trainer), params_of(theirs), strict=True)
    )


@pytest.mark.parametrize(("dtype", "bf16"), KINDS, ids=KIND_IDS)
def test_resumes_from_its_checkpoint_bit_for_bit(tmp_path, dtype, bf16):
    options = {
        "dtype": dtype,
        "bf16": bf16,
        "save_strategy": "steps",
        "save_steps": 3,
        "options": {"moments": "q8"},
    }
    whole, optimizer = trainer_of(tmp_path / "whole", **options)
    whole.train()
    resumed, resumed_optimizer = trainer_of(tmp_path / "resumed", **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))
    optimizer.state_dict()
    resumed_optimizer.state_dict()
    assert logged(resumed, "loss")[-3:] == logged(whole, "loss")[-3:]
    assert logged(resumed, "grad_norm")[-3:] == logged(whole, "grad_norm")[-3:]
    assert all(
        torch.equal(one, other)
        for one, other in zip(params_of(resumed), params_of(whole), strict=True)
    )
    for one, other in zip(optimizer.state.values(), resumed_optimizer.state.values(), strict=True):
        assert all(torch.equal(bits(one[name]), bits(other[name])) for name in one)


def test_evaluates_and_saves_what_was_stepped(tmp_path):
    def run(waits):
        trainer, _ = trainer_of(
            tmp_path / waits, eval_strategy="steps", eval_steps=2, gives_model=waits == "forwards"
        )
        trainer.train()
        trainer.save_model(str(tmp_path / waits))
        saved = transformers.LlamaForCausalLM.from_pretrained(tmp_path / waits)
        return logged(trainer, "eval_loss"), [bits(param) for param in saved.parameters()]

    (losses, params), (expected_losses, expected) = run("forwards"), run("step")
    assert len(losses) == 3
    assert losses == expected_losses
    assert all(torch.equal(one, other) for one, other in zip(params, expected, strict=True))


def test_other_optimizers_are_refused(tmp_path):
    trainer, _ = trainer_of(tmp_path, stepwell.AdamW)
    with pytest.raises(ValueError, match=r"`AdamW`, expected none(.|\n)*hint"):
        offload_trainer(trainer)
    trainer, _ = trainer_of(tmp_path)
    with pytest.raises(ValueError, match="`moments` are given for another"):
        offload_trainer(trainer, moments="q8")


OTHERS = {
    "norm": lambda params, accelerator: accelerator.clip_grad_norm_(params, 0.5, norm_type=1.0),
    "parameters": lambda params, accelerator: accelerator.clip_grad_norm_(params[1:], 0.5),
    "scaler": lambda params, accelerator: accelerator.clip_grad_norm_(params, 0.5),
}


@pytest.mark.parametrize("which", OTHERS)
def test_what_the_step_cannot_do_is_left_to_the_trainer(which):
    net, optimizer = pair()[0]
    clipped = []

    def clip(parameters, max_norm, norm_type=2.0):
        clipped.append((len(parameters), max_norm, norm_type))
        return torch.tensor(7.0)

    accelerator = types.SimpleNamespace(clip_grad_norm_=clip, scaler=None)
    args = types.SimpleNamespace(world_size=1)
    trainer = types.SimpleNamespace(optimizer=optimizer, accelerator=accelerator, args=args)
    offload_trainer(trainer)
    params, norms = list(net.parameters()), []
    for step in range(2):
        optimizer.zero_grad()
        loss_of(net, step).backward()
        norms.append(accelerator.clip_grad_norm_(params, 0.5))
        assert optimizer.clip_norm == 0.5 and norms[-1].isnan()
        optimizer.step()
        assert norms[-1].item() == pytest.approx(optimizer.grad_norm)
    # That of the step before stays.
    assert norms[0] != norms[1]
    assert not clipped
    loss_of(net, 2).backward()
    if which == "scaler":
        accelerator.scaler = object()
    assert OTHERS[which](params, accelerator).item() == 7.0
    expected = (len(params) - (which == "parameters"), 0.5, 1.0 if which == "norm" else 2.0)
    assert clipped == [expected]
    assert optimizer.clip_norm is None


# ---- made by it, in one line ----


ARGUMENTS = {
    "max_steps": STEPS,
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "logging_steps": 1,
    "save_strategy": "no",
    "learning_rate": 3e-3,
    "adam_beta1": 0.8,
    "adam_beta2": 0.95,
    "adam_epsilon": 1e-6,
    "weight_decay": 0.3,
    "max_grad_norm": 0.5,
    "use_cpu": True,
    "report_to": [],
    "disable_tqdm": True,
    "dataloader_pin_memory": False,
    "seed": 3,
}


def plain_trainer(folder, kind=transformers.Trainer, **arguments):
    args = transformers.TrainingArguments(output_dir=str(folder), **ARGUMENTS | arguments)
    return kind(model=llama(torch.float32), args=args, train_dataset=Tokens())


class GroupsOfItsOwn(transformers.Trainer):
    """As trainers of other libraries are."""

    def get_decay_parameter_names(self, model):
        return [name for name in super().get_decay_parameter_names(model) if "mlp" in name]


@pytest.mark.parametrize("kind", [transformers.Trainer, GroupsOfItsOwn])
def test_it_trains_as_trainer_does_by_its_arguments(tmp_path, kind):
    theirs = plain_trainer(tmp_path, kind, optim="adamw_torch")
    theirs.train()
    ours = plain_trainer(tmp_path, kind)
    offload_trainer(ours)
    ours.train()
    optimizer = ours.optimizer.optimizer
    assert isinstance(optimizer, stepwell.OffloadAdamW)
    assert forwards_wait(optimizer)
    assert optimizer.clip_norm == 0.5
    for own, other in zip(optimizer.param_groups, theirs.optimizer.param_groups, strict=True):
        for name in ("lr", "betas", "eps", "weight_decay"):
            assert own[name] == other[name], name
        assert len(own["params"]) == len(other["params"])
    assert logged(ours, "loss") == pytest.approx(logged(theirs, "loss"), rel=1e-5)
    assert logged(ours, "grad_norm") == pytest.approx(logged(theirs, "grad_norm"), rel=1e-4)
    for one, other in zip(ours.model.parameters(), theirs.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_a_checkpoint_points_to_the_volume_and_is_gone_on_from(tmp_path, caplog):
    def trained(folder, steps=STEPS, since=None, **options):
        """The weights after `steps`, of a run that ends then."""
        volume = tmp_path / f"drive-{folder}"
        volume.mkdir(exist_ok=True)
        trainer = plain_trainer(
            tmp_path / folder,
            max_steps=steps,
            save_strategy="steps",
            save_steps=3,
            lr_scheduler_type="constant",
        )
        tier = stepwell.Volume([volume], name="run", resume=True, commit_interval=3)
        offload_trainer(trainer, tier=tier, **options)
        checkpoint = since and str(tmp_path / since)
        trainer.train(resume_from_checkpoint=checkpoint)
        trainer.optimizer.optimizer.synchronize()
        assert trainer.optimizer.optimizer.committed_steps == steps
        weights = params_of(trainer)
        del trainer
        gc.collect()
        return weights

    expected = trained("whole")
    trained("parts", steps=3)
    saved = torch.load(tmp_path / "parts" / "checkpoint-3" / "optimizer.pt", weights_only=True)
    assert saved["volume"] == {"name": "run", "step": 3}
    assert not saved["state"]
    assert all(map(torch.equal, trained("parts", since="parts/checkpoint-3"), expected))
    assert "which has gone on" not in caplog.text
    # The volume has gone on since the checkpoint.
    with pytest.raises(AssertionError):
        trained("parts", since="parts/checkpoint-3")
    assert "of step 3 of volume `run`, which has gone on to step 6" in caplog.text
    # Without that volume there is no state.
    with pytest.raises(ValueError, match=r"of step `3` of volume `run`(.|\n)*resume=True"):
        trained("other", since="parts/checkpoint-3")
    # Asked for, it is in the file.
    trained("asked", saves_volume=True)
    asked = torch.load(tmp_path / "asked" / "checkpoint-3" / "optimizer.pt", weights_only=True)
    assert "volume" not in asked
    assert asked["state"]
