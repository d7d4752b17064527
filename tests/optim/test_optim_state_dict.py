"""State dicts: exact resumption, conversion between codecs, and exchange.

They are exchanged with torch.optim.AdamW and DeepSpeedCPUAdam.
"""

import copy
import io

import pytest
import stepwell
import torch
from optim_cases import CODECS, LAYOUT_IDS, LAYOUTS, assert_same, bits, parameter, snapshot, stepped

# Relative error of one moment after one rounding: bf16 has 8 bits, q8's neighbours are 1/16 of the
# value apart at most, where values are large.
CODEC_ERROR = {"fp32": 0.0, "bf16": 2.0**-7, "q8": 0.05}


def saved_and_loaded(value, weights_only=True):
    stream = io.BytesIO()
    torch.save(value, stream)
    stream.seek(0)
    return torch.load(stream, weights_only=weights_only)


def advance(optimizer, steps, seed):
    torch.manual_seed(seed)
    for _ in range(steps):
        for group in optimizer.param_groups:
            for param in group["params"]:
                param.grad = torch.randn(param.shape).to(param.dtype)
        optimizer.step()


@pytest.mark.parametrize("order", ["optimizer-first", "model-first"])
@pytest.mark.parametrize(("dtype", "moments"), LAYOUTS, ids=LAYOUT_IDS)
def test_resuming_is_as_if_never_stopped(dtype, moments, order):
    params = [parameter(70_001, dtype=dtype), parameter(3, 5, dtype=dtype)]
    optimizer = stepwell.AdamW(params, moments=moments, seed=7)
    advance(optimizer, 4, seed=1)
    checkpoint = saved_and_loaded(
        {"params": [p.detach() for p in params], "optimizer": optimizer.state_dict()}
    )

    fresh = [parameter(*param.shape, dtype=dtype) for param in params]
    resumed = stepwell.AdamW(fresh, lr=0.5, moments=moments)
    # A used optimizer, too, must take over all of it.
    advance(resumed, 1, seed=2)
    if order == "optimizer-first":
        resumed.load_state_dict(checkpoint["optimizer"])
    for param, values in zip(fresh, checkpoint["params"], strict=True):
        param.data.copy_(values)
    if order == "model-first":
        resumed.load_state_dict(checkpoint["optimizer"])
    assert_same(snapshot(optimizer), snapshot(resumed))
    advance(optimizer, 3, seed=3)
    advance(resumed, 3, seed=3)
    assert_same(snapshot(optimizer), snapshot(resumed))


def test_loaded_state_is_not_shared_with_the_dict():
    param = parameter(10)
    optimizer = stepped(param)
    packed = optimizer.state_dict()
    twin = stepwell.AdamW([parameter(10)])
    twin.load_state_dict(packed)
    before = snapshot(optimizer)
    advance(twin, 1, seed=1)
    assert_same(before, snapshot(optimizer))


@pytest.mark.parametrize("source", CODECS)
@pytest.mark.parametrize("target", CODECS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_codecs_convert_into_each_other(source, target, dtype):
    optimizer = stepped(parameter(3000, dtype=dtype), moments=source, steps=10)
    param = parameter(3000, dtype=dtype)
    other = stepwell.AdamW([param], moments=target)
    other.load_state_dict(optimizer.state_dict())
    assert (
        other.state[param].keys()
        == stepped(parameter(1, dtype=dtype), moments=target).state_dict()["state"][0].keys()
    )
    assert other.state[param]["step"] == 10
    ours, theirs = (o.decoded_state_dict()["state"][0] for o in (other, optimizer))
    for name in ("exp_avg", "exp_avg_sq"):
        assert ours[name].dtype == torch.float32
        error = (ours[name] - theirs[name]).norm() / theirs[name].norm()
        assert error <= (0.0 if source == target else CODEC_ERROR[target])
        if target == "fp32" or source == target:
            assert torch.equal(bits(ours[name]), bits(theirs[name]))
    assert ((ours["exp_avg_sq"] > 0) | (theirs["exp_avg_sq"] == 0)).all(), (
        "a moment above 0 was coded to 0"
    )
    advance(other, 2, seed=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_of_another_format_is_refused(dtype):
    param = parameter(3000, dtype=dtype)
    packed = saved_and_loaded(stepped(param, moments="q8").state_dict())
    optimizer = stepped(param, moments="q8")
    before = snapshot(optimizer)
    packed["param_groups"][0]["state_format"] += 1
    with pytest.raises(
        ValueError,
        match="`state_format` of the loaded state dict is `2`, expected `1`: another version",
    ):
        optimizer.load_state_dict(packed)
    assert_same(before, snapshot(optimizer))
    # Whatever somebody has written into the living group, as DeepSpeed does.
    optimizer.param_groups[0]["state_format"] += 1
    assert optimizer.state_dict()["param_groups"][0]["state_format"] == stepwell._core.STATE_FORMAT
    # What the hint says: plain moments are of no format.
    decoded = stepped(param, moments="q8").decoded_state_dict()
    assert all("state_format" not in group for group in decoded["param_groups"])
    optimizer.load_state_dict(decoded)
    assert optimizer.param_groups[0]["state_format"] == stepwell._core.STATE_FORMAT


@pytest.mark.parametrize("moments", CODECS)
def test_conversion_is_reproducible_and_unbiased(moments):
    exact = stepped(parameter(20_000), steps=3)
    copies = []
    for seed in (1, 1, 2):
        param = parameter(20_000)
        optimizer = stepwell.AdamW([param], moments=moments, seed=seed)
        packed = exact.state_dict()
        packed["param_groups"][0]["seed"] = seed
        optimizer.load_state_dict(packed)
        copies.append(optimizer)
    first, same, other = (copy.decoded_state_dict()["state"][0]["exp_avg"] for copy in copies)
    assert torch.equal(bits(first), bits(same))
    if moments != "fp32":
        assert not torch.equal(bits(first), bits(other))
    expected = exact.state_dict()["state"][0]["exp_avg"]
    # The mean of 20,000 errors, each within a step of the code, is some hundred times smaller than
    # one.
    assert (first - expected).mean().abs() < expected.abs().max() * 2.0**-7 / 30


# ---- torch.optim.AdamW ----


@pytest.mark.parametrize("decoded", [False, True])
@pytest.mark.parametrize("foreach", [False, True])
def test_to_torch_and_back_exactly(decoded, foreach):
    ours, theirs = parameter(1000), parameter(1000)
    optimizer = stepped(ours, lr=0.02, betas=(0.8, 0.99), weight_decay=0.3)
    reference = torch.optim.AdamW([theirs], foreach=foreach)
    theirs.data.copy_(ours.data)
    reference.load_state_dict(
        copy.deepcopy(optimizer.decoded_state_dict() if decoded else optimizer.state_dict())
    )
    for name in ("exp_avg", "exp_avg_sq", "step"):
        assert torch.equal(bits(reference.state[theirs][name]), bits(optimizer.state[ours][name]))
    for one in (optimizer, reference):
        advance(one, 3, seed=1)
    torch.testing.assert_close(ours, theirs)

    back = parameter(1000)
    returned = stepwell.AdamW([back])
    returned.load_state_dict(saved_and_loaded(reference.state_dict()))
    assert returned.param_groups[0]["lr"] == 0.02
    for name in ("exp_avg", "exp_avg_sq", "step"):
        assert torch.equal(bits(returned.state[back][name]), bits(reference.state[theirs][name]))
    advance(returned, 1, seed=1)


@pytest.mark.parametrize("moments", CODECS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_torchs_state_of_16_bit_parameters(dtype, moments):
    # torch holds the moments in the parameter's dtype and has no master: they are taken at their
    # values.
    theirs, ours = parameter(500, dtype=dtype), parameter(500, dtype=dtype)
    reference = torch.optim.AdamW([theirs])
    advance(reference, 3, seed=1)
    optimizer = stepwell.AdamW([ours], moments=moments)
    optimizer.load_state_dict(reference.state_dict())
    assert optimizer.state[ours].keys() == stepped(theirs, moments=moments).state[theirs].keys()
    state = optimizer.decoded_state_dict()["state"][0]
    for name in ("exp_avg", "exp_avg_sq"):
        expected = reference.state[theirs][name].float()
        assert (state[name] - expected).norm() / expected.norm() <= CODEC_ERROR[moments]
    advance(optimizer, 1, seed=2)
    assert ours.isfinite().all()


def test_master_bits_that_torch_has_cast_are_left_behind(caplog):
    ours, theirs, back = (parameter(100, dtype=torch.bfloat16) for _ in range(3))
    optimizer = stepped(ours)
    reference = torch.optim.AdamW([theirs])
    reference.load_state_dict(optimizer.state_dict())
    assert reference.state[theirs]["trailing"].dtype == torch.bfloat16
    returned = stepwell.AdamW([back])
    with caplog.at_level("WARNING", logger="stepwell"):
        returned.load_state_dict(reference.state_dict())
    assert "trailing" in caplog.text
    assert returned.state[back]["trailing"].dtype == torch.int16
    advance(returned, 1, seed=1)


# ---- DeepSpeedCPUAdam ----


def test_deepspeeds_integer_step_and_group_keys():
    # The dict as deepspeed/ops/adam/cpu_adam.py makes it. (The optimizer itself: the programs of
    # test_deepspeed_register.)
    group = {
        "lr": 0.1,
        "betas": (0.9, 0.99),
        "eps": 1e-8,
        "weight_decay": 0,
        "bias_correction": False,
        "amsgrad": False,
    }
    state = {"step": 3, "exp_avg": torch.ones(4), "exp_avg_sq": torch.ones(4)}
    param = torch.nn.Parameter(torch.zeros(4))
    optimizer = stepwell.AdamW([param], betas=(0.1, 0.1), maximize=True)
    optimizer.load_state_dict({"state": {0: state}, "param_groups": [{**group, "params": [0]}]})
    assert optimizer.state[param]["step"] == 3
    param.grad = torch.ones(4)
    optimizer.step()
    # Without bias correction the update is lr * m / sqrt(v); and `maximize`, which the dict does
    # not have, stays.
    m, v = 0.9 * 1 + 0.1 * -1, 1.0
    torch.testing.assert_close(param.detach(), torch.full((4,), -0.1 * m / v))
    packed = optimizer.decoded_state_dict()
    assert type(packed["state"][0]["step"]) is int
    assert group.keys() <= packed["param_groups"][0].keys()


# ---- what does not fit ----


def _spoilt(**changes):
    def spoil(packed):
        packed["state"][1].update(changes)

    return spoil


def _without(name):
    return lambda packed: packed["state"][1].pop(name)


@pytest.mark.parametrize(
    ("spoil", "pattern"),
    [
        (_spoilt(exp_avg=torch.zeros(4)), r"`exp_avg` .*\(4,\).*expected `\(5,\)`"),
        (_spoilt(exp_avg=torch.zeros(5, dtype=torch.int32)), "`exp_avg` .*int32"),
        (_spoilt(exp_avg=torch.zeros(5).to_sparse()), "`exp_avg` .*`sparse_coo`, expected a dense"),
        (_spoilt(max_exp_avg_sq=torch.zeros(5)), "AMSGrad"),
        (_spoilt(step=-1), "step `-1`"),
        (_without("exp_avg_sq"), "`exp_avg_sq`"),
        (_without("step"), "step"),
        (lambda packed: packed["param_groups"][0].update(amsgrad=True), "amsgrad"),
        (lambda packed: packed["param_groups"][0].update(betas=(2.0, 0.9)), "betas"),
        (lambda packed: packed["param_groups"][0]["params"].pop(), "doesn't match the size"),
    ],
    ids=[
        "size",
        "dtype",
        "sparse",
        "amsgrad-state",
        "step",
        "no-moment",
        "no-step",
        "amsgrad-group",
        "betas",
        "fewer-parameters",
    ],
)
def test_dict_that_does_not_fit_changes_nothing(spoil, pattern):
    params = [parameter(5), parameter(5)]
    optimizer = stepwell.AdamW(params)
    advance(optimizer, 2, seed=1)
    packed = copy.deepcopy(optimizer.state_dict())
    advance(optimizer, 1, seed=2)
    before, groups = snapshot(optimizer), copy.deepcopy(optimizer.state_dict()["param_groups"])
    spoil(packed)
    with pytest.raises(ValueError, match=pattern):
        optimizer.load_state_dict(packed)
    assert_same(before, snapshot(optimizer))
    assert optimizer.state_dict()["param_groups"] == groups
    advance(optimizer, 1, seed=3)


@pytest.mark.parametrize("count", [torch.tensor(2.0).to_sparse(), torch.tensor(-1.0), "two"])
def test_a_count_of_the_state_that_is_none_is_refused(count):
    """A step that began would count the parameters before it."""
    params = [parameter(3) for _ in range(3)]
    optimizer = stepwell.AdamW(params)
    advance(optimizer, 1, seed=1)
    optimizer.state[params[1]]["step"] = count
    with pytest.raises(ValueError, match=r"expected a count(.|\n)*hint: "):
        advance(optimizer, 1, seed=2)
    assert [float(optimizer.state[param]["step"]) for param in params[::2]] == [1.0, 1.0]


def test_execution_flags_of_the_dict_are_left_behind():
    theirs, ours = parameter(3), parameter(3)
    reference = torch.optim.AdamW([theirs], fused=True)
    advance(reference, 1, seed=1)
    packed = reference.state_dict()
    packed["param_groups"][0]["capturable"] = True
    optimizer = stepwell.AdamW([ours])
    optimizer.load_state_dict(packed)
    assert optimizer.param_groups[0]["capturable"] is False
    assert optimizer.param_groups[0]["fused"] is None
