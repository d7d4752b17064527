"""What is written to a parameter between two steps wins.

A parameter with trailing bits never becomes another value or a NaN.
"""

import pytest
import stepwell
import torch
from optim_cases import CODECS, bits, master, parameter, stepped
from stepwell import _core

LOW = [torch.bfloat16, torch.float16]
NUMEL = 3 * _core.CHUNK_LEN // 2


def _load_state_dict(param, values):
    module = torch.nn.Module()
    module.weight = param
    module.load_state_dict({"weight": values})


def _swap(param, values):
    param.data = values.clone()


def _write_by_numpy(param, values):
    # Not even a version counter sees this.
    param.detach().view(torch.int16).numpy()[...] = values.view(torch.int16).numpy()


WRITES = [
    _load_state_dict,
    _swap,
    _write_by_numpy,
    lambda param, values: param.data.copy_(values),
]
WRITE_IDS = ["load_state_dict", "data=", "numpy", "data.copy_"]


def assert_is_master_of(now, values):
    """`now` is the master of a parameter that was set to `values`; 0 and -0 are one number."""
    if values.dtype == torch.bfloat16:
        assert torch.equal(now, values.float())
    else:
        # Where the very value was written that the parameter had, nobody can tell, and the master
        # keeps its exact bits.
        assert torch.equal(now.to(values.dtype), values)
        assert (now != values.float()).sum() <= NUMEL // 100


def _step_at_lr_0(optimizer, param):
    """A step that shows what the optimizer takes the master for: it adds nothing to it."""
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    param.grad = torch.zeros_like(param)
    optimizer.step()
    return master(optimizer, param)


@pytest.mark.parametrize("write", WRITES, ids=WRITE_IDS)
@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("moments", CODECS)
def test_what_was_written_is_the_master(write, dtype, moments):
    param = parameter(NUMEL, dtype=dtype)
    optimizer = stepped(param, moments=moments)
    assert not torch.equal(master(optimizer, param), param.float())
    values = torch.randn(NUMEL).to(dtype)
    # Zeros and the least numbers turn stale trailing bits into NaNs and huge values.
    values[: NUMEL // 3 : 2] = 0
    values[1 : NUMEL // 3 : 2] = -0.0
    values[NUMEL // 3] = torch.finfo(dtype).smallest_normal
    write(param, values)
    now = _step_at_lr_0(optimizer, param)
    assert torch.equal(param, values)
    assert_is_master_of(now, values)


@pytest.mark.parametrize("where", [0, 1, NUMEL // 2, NUMEL - 1])
@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_one_written_element_is_enough(dtype, where):
    param = parameter(NUMEL, dtype=dtype)
    optimizer = stepped(param)
    before = bits(param)
    param.data[where] = 0.0
    now = _step_at_lr_0(optimizer, param)
    assert now[where] == 0
    untouched = torch.arange(NUMEL) != where
    assert torch.equal(bits(param)[untouched], before[untouched])
    chunk = where // _core.CHUNK_LEN
    other = 1 - chunk
    elsewhere = slice(other * _core.CHUNK_LEN, (other + 1) * _core.CHUNK_LEN)
    assert not torch.equal(now[elsewhere], param[elsewhere].float()), (
        "the other chunk keeps its exact master"
    )


@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_swapping_away_and_back_keeps_the_master(dtype):
    param = parameter(NUMEL, dtype=dtype)
    optimizer = stepped(param)
    before, kept = master(optimizer, param), param.data
    param.data = torch.zeros_like(kept)
    param.data = kept.clone()
    assert torch.equal(bits(_step_at_lr_0(optimizer, param)), bits(before))


@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_no_written_pattern_becomes_a_nan(dtype):
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(dtype)
    finite = every[every.isfinite()]
    param = torch.nn.Parameter(torch.ones_like(finite))
    optimizer = stepped(param)
    param.data.copy_(finite)
    now = _step_at_lr_0(optimizer, param)
    assert_is_master_of(now, finite)


@pytest.mark.parametrize("start", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("end", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_module_may_change_its_dtype(start, end):
    module = torch.nn.Linear(9, 7, dtype=start)
    optimizer = stepwell.AdamW(module.parameters(), lr=1e-3)
    for count, dtype in enumerate((start, end, start), 1):
        module.to(dtype)
        for param in module.parameters():
            param.grad = torch.ones_like(param)
        before = [param.detach().clone() for param in module.parameters()]
        optimizer.step()
        for param, old in zip(module.parameters(), before, strict=True):
            assert param.isfinite().all()
            assert (param - old).abs().max() < 1e-2
            # The moments go on, also where the master begins anew.
            state = optimizer.state[param]
            assert state["step"] == count
            torch.testing.assert_close(
                state["exp_avg"], torch.full_like(state["exp_avg"], 1 - 0.9**count)
            )
            expected = {
                torch.bfloat16: {"trailing", "fingerprints"},
                torch.float16: {"master"},
                torch.float32: set(),
            }
            assert (
                optimizer.state[param].keys() == {"step", "exp_avg", "exp_avg_sq"} | expected[dtype]
            )


def test_transposed_in_place_at_the_same_address():
    ours, theirs = torch.nn.Parameter(torch.ones(6, 6)), torch.nn.Parameter(torch.ones(6, 6))
    ours.grad, theirs.grad = torch.ones(6, 6), torch.ones(6, 6)
    optimizer, reference = stepwell.AdamW([ours]), torch.optim.AdamW([theirs])
    for step in range(4):
        # In place: a gradient elsewhere would have all addresses looked up again.
        ours.grad.copy_(torch.randn(6, 6))
        theirs.grad.copy_(ours.grad)
        optimizer.step()
        reference.step()
        if step == 1:
            ours.data, theirs.data = ours.data.t(), theirs.data.t()
    torch.testing.assert_close(ours, theirs)


def _made_in_inference_mode():
    with torch.inference_mode():
        return torch.tensor(7.0)


@pytest.mark.parametrize(
    "make",
    [
        # What DeepSpeed's checkpoint loaders leave in the state.
        lambda: 7,
        lambda: torch.tensor(7),
        lambda: torch.tensor(7.0, dtype=torch.float64),
        _made_in_inference_mode,
    ],
    ids=["int", "int64", "float64", "inference"],
)
def test_steps_of_other_kinds_are_understood(make):
    param = parameter(10)
    optimizer = stepped(param)
    optimizer.state[param]["step"] = make()
    optimizer.step()
    counter = optimizer.state[param]["step"]
    assert (counter.item(), counter.dtype, counter.is_inference()) == (8.0, torch.float32, False)
