"""StepwellAdamW as ZeRO uses it, without DeepSpeed.

Partitions that come and go, state dicts that tools read.
"""

import io
from types import SimpleNamespace

import pytest
import stepwell
import torch
from stepwell.deepspeed import StepwellAdam, StepwellAdamW
from stepwell.deepspeed.state.decoding import DecodingState
from stepwell.deepspeed.zero import optimizer_type

NUMEL = 5000


def flat(seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    param = torch.nn.Parameter((torch.randn(NUMEL, generator=generator) * 0.05).to(dtype))
    param.grad = torch.randn(NUMEL, generator=generator).to(dtype)
    return param


def step_one_at_a_time(optimizer, params):
    """As ZeRO-1/2 do (groups come and go).

    With the parameters of ZeRO-3, which come and go in a group.
    """
    groups = optimizer.param_groups
    for param in params:
        optimizer.param_groups = [{**groups[0], "params": [param]}]
        optimizer.step()
    optimizer.param_groups = groups


@pytest.mark.parametrize("moments", ["bf16", "q8"])
def test_partitions_are_rounded_independently(moments):
    def states(cls):
        params = [flat() for _ in range(2)]
        optimizer = cls([torch.nn.Parameter(torch.zeros(1))], moments=moments)
        step_one_at_a_time(optimizer, params)
        key = "exp_avg_codes" if moments == "q8" else "exp_avg"
        return [optimizer.state[param][key] for param in params]

    # Each partition is the first parameter of its step. Plain AdamW would give equal ones equal
    # roundings.
    assert torch.equal(*states(stepwell.AdamW))
    first, second = states(StepwellAdamW)
    assert not torch.equal(first, second)
    # The same again, as for a run that is resumed.
    for state, again in zip((first, second), states(StepwellAdamW), strict=True):
        assert torch.equal(state, again)


def test_ranks_are_rounded_independently(monkeypatch):
    states = []
    for rank in (0, 1):
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
        param = flat()
        optimizer = StepwellAdamW([param], moments="bf16")
        optimizer.step()
        states.append(optimizer.state[param]["exp_avg"])
    assert not torch.equal(*states)


@pytest.mark.parametrize("moments", ["fp32", "bf16", "q8"])
def test_state_dicts_resume_to_the_bit_and_are_read_by_plain_names(moments):
    params = [flat(seed) for seed in range(2)]
    optimizer = StepwellAdamW(params, moments=moments)
    optimizer.step()
    buffer = io.BytesIO()
    torch.save(optimizer.state_dict(), buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    assert isinstance(loaded["state"][0], DecodingState) == (moments == "q8")
    plain = optimizer.decoded_state_dict()["state"]
    for index in range(2):
        for name in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(loaded["state"][index][name].float(), plain[index][name])

    others = [torch.nn.Parameter(param.detach().clone()) for param in params]
    for other, param in zip(others, params, strict=True):
        other.grad = param.grad
    resumed = StepwellAdamW(others, moments=moments)
    resumed.load_state_dict(loaded)
    optimizer.step()
    resumed.step()
    for other, param in zip(others, params, strict=True):
        assert torch.equal(other, param)
        for name, value in optimizer.state[param].items():
            assert torch.equal(resumed.state[other][name], value), name
            assert type(resumed.state[other]) is dict


# ---- which type a DeepSpeed JSON gets ----


def engine(name, params=None, *, moments="q8", has_bf16_states=False):
    """What is asked of a DeepSpeedEngine with an optimizer of this name."""
    block = {} if moments is None else {"stepwell": {"moments": moments}}
    return SimpleNamespace(
        optimizer_name=lambda: name,
        optimizer_params=lambda: params,
        bf16_optimizer_states=lambda: has_bf16_states,
        _config=SimpleNamespace(_param_dict=block),
    )


@pytest.mark.parametrize(
    ("name", "params", "cls"),
    [
        ("adamw", None, StepwellAdamW),
        ("adamw", {"adam_w_mode": False}, StepwellAdamW),
        ("adam", None, StepwellAdamW),
        ("adam", {"adam_w_mode": True}, StepwellAdamW),
        ("adam", {"adam_w_mode": False}, StepwellAdam),
        ("lamb", None, None),
    ],
)
def test_coded_moments_keep_the_decay_that_the_json_asks_for(name, params, cls):
    assert optimizer_type._type_with_moments(engine(name, params)) is cls
    for plain in (None, "fp32"):
        assert optimizer_type._type_with_moments(engine(name, params, moments=plain)) is None


@pytest.mark.parametrize(
    ("name", "params", "options", "said"),
    [
        ("stepwelladamw", {"max_grad_norm": 1.0}, {}, "hint: gradient_clipping"),
        ("stepwelladamw", {"adam_w_mode": True}, {}, "`adam_w_mode` in the params"),
        ("stepwelladamw", {"moments": "bf16"}, {}, "but `q8` in the block"),
        (
            "stepwelladamw",
            {"moments": "fp32"},
            {"moments": None, "has_bf16_states": True},
            "bf16_optimizer_states is set",
        ),
    ],
)
def test_keywords_that_contradict_are_refused(name, params, options, said):
    with pytest.raises(ValueError, match=said):
        optimizer_type._keywords(engine(name, params, **options), "StepwellAdamW")
