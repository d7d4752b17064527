"""What cannot work raises a ValueError that says what to do, and leaves every bit as it was."""

import itertools
import re

import fork_server
import pytest
import stepwell
import torch
from optim_cases import LAYOUT_IDS, LAYOUTS, SPECIALS, assert_same, parameter, snapshot, stepped
from stepwell import _core

# A hint follows every message.
HINTED = r"(.|\n)*hint: "


def assert_refused(optimizer, pattern):
    """A step raises ValueError, says `pattern` and a hint, and changes nothing."""
    before = snapshot(optimizer)
    groups = [dict(group, params=None) for group in optimizer.param_groups]
    with pytest.raises(ValueError, match=pattern + HINTED):
        optimizer.step()
    assert_same(before, snapshot(optimizer))
    assert groups == [dict(group, params=None) for group in optimizer.param_groups]


# ---- gradients that are not finite ----


@pytest.mark.parametrize("special", SPECIALS, ids=str)
@pytest.mark.parametrize("started", [False, True], ids=["first-step", "later-step"])
@pytest.mark.parametrize(("dtype", "moments"), LAYOUTS, ids=LAYOUT_IDS)
def test_nonfinite_gradient_changes_nothing(dtype, moments, started, special):
    first, second = parameter(70_000, dtype=dtype), parameter(3, 5, dtype=dtype)
    # Different groups: the first must not be stepped before the second is looked at.
    optimizer = stepwell.AdamW(
        [{"params": [first]}, {"params": [second], "lr": 1e-4}], moments=moments
    )
    if started:
        optimizer.step()
    second.grad[1, 2] = special
    assert_refused(
        optimizer, r"group 1, index 0, shape \(3, 5\)\) is not finite; nothing was changed"
    )
    assert started or not optimizer.state


@pytest.mark.parametrize("started", [False, True], ids=["first-step", "later-step"])
def test_nonfinite_gradient_is_named_beside_an_empty_one(started):
    params = [parameter(0), parameter(3), parameter(4)]
    optimizer = stepwell.AdamW(params)
    if started:
        optimizer.step()
    params[1].grad[2] = torch.nan
    assert_refused(optimizer, r"index 1, shape \(3,\)\) is not finite")


def test_nonfinite_gradient_is_named_as_its_parameter_is():
    module = torch.nn.Linear(3, 2)
    optimizer = stepwell.AdamW(module.named_parameters())
    for param in module.parameters():
        param.grad = torch.zeros_like(param)
    module.bias.grad[0] = torch.nan
    with pytest.raises(ValueError, match=r"parameter `bias` \(group 0, index 1, shape \(2,\)\)"):
        optimizer.step()


@pytest.mark.parametrize(("dtype", "moments"), LAYOUTS, ids=LAYOUT_IDS)
def test_skip_counts_and_changes_nothing_else(dtype, moments):
    param = parameter(100, dtype=dtype)
    optimizer = stepped(param, moments=moments, nonfinite="skip")
    before = snapshot(optimizer)
    param.grad[7] = torch.inf
    optimizer.step()
    optimizer.step()
    assert_same(before, snapshot(optimizer))
    assert optimizer.skipped_steps == 2
    param.grad.zero_()
    optimizer.step()
    assert optimizer.state[param]["step"] == 4
    resumed = stepwell.AdamW([parameter(100, dtype=dtype)], moments=moments)
    resumed.load_state_dict(optimizer.state_dict())
    assert resumed.skipped_steps == 2


def test_propagate_is_torchs_way():
    ours, theirs = parameter(10), parameter(10)
    theirs.data.copy_(ours.data)
    theirs.grad = ours.grad.clone()
    ours.grad[3] = theirs.grad[3] = torch.nan
    optimizer = stepwell.AdamW([ours], nonfinite="propagate")
    optimizer.step()
    torch.optim.AdamW([theirs]).step()
    torch.testing.assert_close(ours, theirs, equal_nan=True)
    assert ours.isnan().sum() == 1


def test_propagate_does_not_read_gradients_twice(monkeypatch):
    param = parameter(10)
    optimizer = stepwell.AdamW([param], nonfinite="propagate")
    monkeypatch.setattr(_core, "grad_stats", None)
    optimizer.step()


# ---- parameters and gradients ----


def _sparse_gradient():
    embedding = torch.nn.Embedding(4, 3, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    return embedding.weight


@pytest.mark.parametrize(
    ("make", "pattern"),
    [
        (_sparse_gradient, "sparse"),
        (lambda: _with_grad_dtype(torch.float64), "float64.*expected float32"),
    ],
    ids=["sparse", "float64"],
)
def test_gradient_that_cannot_be_stepped(make, pattern):
    bad, good = make(), parameter(3)
    assert_refused(stepwell.AdamW([{"params": [good], "lr": 0.1}, {"params": [bad]}]), pattern)


def _with_grad_dtype(dtype):
    param = torch.nn.Parameter(torch.ones(3))
    param.grad_dtype = dtype
    param.grad = torch.ones(3, dtype=dtype)
    return param


@pytest.mark.parametrize(
    ("make", "pattern"),
    [
        (lambda: torch.nn.Parameter(torch.ones(3, dtype=torch.float64)), "float64.*torch.float32"),
        (
            lambda: torch.nn.Parameter(torch.ones(3, dtype=torch.complex64)),
            "complex64.*view_as_real",
        ),
        (lambda: torch.nn.Parameter(torch.ones(3, device="meta")), "`meta`.*to_empty"),
        (lambda: torch.nn.Parameter(torch.eye(3).to_sparse()), "sparse.*dense"),
        (lambda: torch.nn.Parameter(torch.ones(1).expand(3)), "more than once.*clone"),
        (
            lambda: torch.nn.Parameter(torch.ones(9).as_strided((3, 3), (1, 1))),
            "more than once.*clone",
        ),
        (lambda: torch.nn.LazyLinear(3).weight, "uninitialized.*run the model"),
    ],
    ids=["float64", "complex", "meta", "sparse", "expanded", "interleaved", "lazy"],
)
def test_parameter_that_cannot_be_stepped(make, pattern):
    good, bad = parameter(3), make()
    with pytest.raises(ValueError, match=pattern):
        stepwell.AdamW([{"params": [good]}, {"params": [bad]}])
    optimizer = stepwell.AdamW([good])
    with pytest.raises(ValueError, match=pattern):
        optimizer.add_param_group({"params": [bad]})
    assert len(optimizer.param_groups) == 1
    optimizer.step()


@pytest.mark.gpu
def test_parameter_on_an_accelerator():
    with pytest.raises(ValueError, match=r"`cuda:0`.*CPU.*hint: stepwell.OffloadAdamW"):
        stepwell.AdamW([torch.nn.Parameter(torch.ones(3, device="cuda"))])


def test_parameter_that_moved_after_construction():
    good, bad = parameter(3), parameter(4)
    optimizer = stepwell.AdamW([{"params": [good]}, {"params": [bad], "lr": 0.1}])
    optimizer.step()
    kept = bad.data
    bad.data = kept.double()
    bad.grad_dtype = None
    bad.grad = torch.ones(4, dtype=torch.float64)
    assert_refused(optimizer, "^the parameter .* is `torch.float64`")
    bad.data = kept
    bad.grad = torch.ones(4)
    optimizer.step()


def test_frozen_parameters_may_be_anything():
    frozen = torch.nn.Parameter(torch.ones(3, dtype=torch.uint8), requires_grad=False)
    stepwell.AdamW([parameter(3), frozen]).step()


def test_gradient_whose_memory_was_freed():
    param = parameter(6)
    optimizer = stepped(param)
    storage = param.grad.untyped_storage()
    nbytes = storage.nbytes()
    storage.resize_(0)
    assert_refused(
        optimizer,
        r"the gradient of the parameter .* takes `24` bytes, but its storage has `0`",
    )
    storage.resize_(nbytes)
    param.grad.fill_(1)
    optimizer.step()


def test_parameter_of_another_size_than_its_state():
    param = parameter(6)
    optimizer = stepped(param)
    param.grad = None
    param.data = torch.ones(7)
    param.grad = torch.ones(7)
    assert_refused(optimizer, r"`exp_avg` in the state.*\(6,\).*\(7,\)")


def test_stale_gradient_of_another_size():
    param = parameter(6)
    optimizer = stepped(param)
    param.data = torch.ones(7)
    assert_refused(optimizer, r"gradient.*\(6,\).*\(7,\)")


@pytest.mark.parametrize(
    "make",
    [
        lambda whole: (whole, whole),
        lambda whole: (whole[:3], whole[2:]),
        lambda whole: (whole[:, :3], whole[:, 2:]),
        lambda whole: (whole, whole[::2]),
    ],
    ids=["the-same", "overlapping", "columns", "slice-of-it"],
)
def test_parameters_that_share_memory(make):
    params = [torch.nn.Parameter(part) for part in make(torch.zeros(4, 5))]
    with pytest.raises(ValueError, match="shares memory.*index" + HINTED):
        stepwell.AdamW(params)
    # The same, arrived at later.
    late = [torch.nn.Parameter(part.detach().clone()) for part in params]
    optimizer = stepwell.AdamW(
        [{"params": [param], "lr": rate} for param, rate in zip(late, (0.1, 0.2), strict=True)]
    )
    for param, alias in zip(late, params, strict=True):
        param.grad = torch.ones_like(param)
        param.data = alias.data
    assert_refused(optimizer, "shares memory")


def test_disjoint_parts_of_one_storage_are_welcome():
    whole = torch.zeros(4, 6)
    params = [
        torch.nn.Parameter(whole[:, :2]),
        torch.nn.Parameter(whole[:, 2:]),
        torch.nn.Parameter(torch.zeros(2)),
    ]
    for param in params:
        param.grad = torch.ones_like(param)
    stepwell.AdamW(params, lr=1.0, weight_decay=0.0, eps=0.0).step()
    torch.testing.assert_close(whole, torch.full((4, 6), -1.0))


def test_a_frozen_parameter_may_share_memory():
    # Steps do not write it.
    param = parameter(4)
    frozen = torch.nn.Parameter(param.data[:2], requires_grad=False)
    optimizer = stepwell.AdamW([param, frozen], lr=0.1)
    optimizer.step()
    assert torch.equal(frozen, param[:2])


def test_gradient_in_the_memory_of_another_parameter():
    first, second = parameter(5), parameter(5)
    optimizer = stepwell.AdamW([{"params": [first]}, {"params": [second], "lr": 0.1}])
    optimizer.step()
    second.grad = first.data
    assert_refused(optimizer, "gradient of .*index 0.* shares memory with the parameter")
    second.grad = optimizer.state[first]["exp_avg"]
    assert_refused(optimizer, "shares memory with `exp_avg`")


def test_state_that_two_parameters_share():
    first, second = parameter(5), parameter(5)
    optimizer = stepwell.AdamW([{"params": [first]}, {"params": [second], "lr": 0.1}])
    optimizer.step()
    optimizer.state[second]["exp_avg"] = optimizer.state[first]["exp_avg"]
    assert_refused(optimizer, "`exp_avg` of .* shares memory with `exp_avg` of")


@pytest.mark.parametrize(
    "value",
    [
        torch.zeros(4, dtype=torch.float64),
        torch.zeros(5),
        None,
        3.0,
        torch.zeros(4, device="meta"),
    ],
    ids=["dtype", "size", "none", "number", "meta"],
)
def test_state_that_does_not_fit(value):
    param = parameter(4)
    optimizer = stepped(param)
    optimizer.state[param]["exp_avg_sq"] = value
    pattern = r"`exp_avg_sq` in the state of the parameter \(group 0, index 0, shape \(4,\)\)"
    with pytest.raises(ValueError, match=pattern + HINTED):
        optimizer.step()


# ---- options ----


BAD_OPTIONS = [
    *(
        ({key: value}, key)
        for key, value in itertools.product(["lr", "eps", "weight_decay"], [-1.0, *SPECIALS])
    ),
    *(
        ({"betas": betas}, "betas")
        for betas in [(1.0, 0.9), (0.9, -0.1), (0.9,), (float("nan"), 0.9)]
    ),
    ({"lr": torch.ones(2)}, "lr"),
    ({"amsgrad": True}, "amsgrad.*torch.optim.AdamW"),
    ({"capturable": True}, "capturable.*torch.optim.AdamW"),
    ({"differentiable": True}, "differentiable.*torch.optim.AdamW"),
]


@pytest.mark.parametrize(
    ("option", "pattern"), BAD_OPTIONS, ids=lambda value: re.sub(r"\W+", "-", str(value))
)
def test_bad_option(option, pattern):
    param, other = parameter(3), parameter(3)
    with pytest.raises(ValueError, match=pattern):
        stepwell.AdamW([param], **option)
    optimizer = stepwell.AdamW([{"params": [param]}, {"params": [other]}])
    with pytest.raises(ValueError, match=pattern):
        optimizer.add_param_group({"params": [parameter(3)], **option})
    optimizer.step()
    before = snapshot(optimizer)
    # A scheduler gone wrong, in the last group.
    optimizer.param_groups[1].update(option)
    with pytest.raises(ValueError, match=pattern):
        optimizer.step()
    assert_same(before, snapshot(optimizer))


@pytest.mark.parametrize("lr", [None, "0.1", torch.zeros(2)], ids=repr)
@pytest.mark.parametrize("make", [stepwell.AdamW, stepwell.OffloadAdamW])
def test_what_is_no_lr_is_refused_in_the_first_step(make, lr):
    # That asks first whether all are 0.
    param = parameter(3)
    optimizer = make([param], lr=0.0)
    if lr is None:
        del optimizer.param_groups[0]["lr"]
    else:
        optimizer.param_groups[0]["lr"] = lr
    with pytest.raises(ValueError, match=r"`lr` of group 0"):
        optimizer.step()
    assert not optimizer.state


@pytest.mark.parametrize("option", [{"moments": "fp8"}, {"nonfinite": "ignore"}])
def test_unknown_choice_lists_the_known(option):
    with pytest.raises(ValueError, match="expected one of"):
        stepwell.AdamW([parameter(3)], **option)


def test_optimizer_wide_options_are_refused_in_a_group():
    with pytest.raises(ValueError, match="`moments` is set for a parameter group"):
        stepwell.AdamW([{"params": [parameter(3)], "moments": "q8"}])


# ---- interrupts ----

INTERRUPTED_PROGRAM = """
import os, signal, sys
import torch, stepwell
from stepwell import _core

params = [torch.nn.Parameter(torch.zeros(1 << 16)) for _ in range(8)]
groups = [{"params": [param], "lr": 1e-3 * (1 + index)} for index, param in enumerate(params)]
optimizer = stepwell.AdamW(groups, betas=(0.9, 0.9999))
for param in params:
    param.grad = torch.ones_like(param)
optimizer.step()
interrupts = 0
armed = False

def interrupt(*_):
    # Once per round: not while the program looks at what the last one has left.
    global armed
    if armed:
        armed = False
        raise KeyboardInterrupt

signal.signal(signal.SIGALRM, interrupt)
signal.setitimer(signal.ITIMER_REAL, 0.001, 0.0007)
while interrupts < 200:
    try:
        armed = True
        while True:
            optimizer.step()
    except KeyboardInterrupt:
        interrupts += 1
        counts = {state["step"].item() for state in optimizer.state.values()}
        # With gradients of 1, exp_avg_sq tells how often its parameter was stepped.
        seen = {optimizer.state[param]["exp_avg_sq"][0].item() for param in params}
        (count, *others), (exp_avg_sq, *more) = counts, seen
        left = 0.9999**count
        if others or more or abs(exp_avg_sq - (1 - left)) > 0.3e-4 * left:
            signal.setitimer(signal.ITIMER_REAL, 0)
            sys.exit(f"a step was cut in two: {counts} {seen}")
signal.setitimer(signal.ITIMER_REAL, 0)
print("whole")
"""


def test_ctrl_c_never_comes_between_two_groups():
    process = fork_server.python("-c", INTERRUPTED_PROGRAM, timeout=100)
    assert (process.stdout, process.returncode) == ("whole\n", 0), process.stderr
