"""What cannot work raises a ValueError that says what to do, and leaves every bit as it was."""

import fork_server
import pytest
import stepwell
import torch
from optim_cases import LAYOUT_IDS, LAYOUTS, SPECIALS, assert_same, parameter, snapshot, stepped
from torch.testing._internal.two_tensor import TwoTensor

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


def test_nonfinite_gradient_is_named_as_its_parameter_is():
    module = torch.nn.Linear(3, 2)
    optimizer = stepwell.AdamW(module.named_parameters())
    for param in module.parameters():
        param.grad = torch.zeros_like(param)
    module.bias.grad[0] = torch.nan
    with pytest.raises(ValueError, match=r"parameter `bias` \(group 0, index 1, shape \(2,\)\)"):
        optimizer.step()


def test_skip_counts_and_changes_nothing_else():
    param = parameter(100)
    optimizer = stepped(param, nonfinite="skip")
    before = snapshot(optimizer)
    param.grad[7] = torch.inf
    optimizer.step()
    optimizer.step()
    assert_same(before, snapshot(optimizer))
    assert optimizer.skipped_steps == 2
    param.grad.zero_()
    optimizer.step()
    assert optimizer.state[param]["step"] == 4
    resumed = stepwell.AdamW([parameter(100)])
    resumed.load_state_dict(optimizer.state_dict())
    assert resumed.skipped_steps == 2


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
        # Of a class that holds other tensors.
        (
            lambda: torch.nn.Parameter(TwoTensor(torch.ones(3), torch.ones(3))),
            "no memory of its own .*unwrap it",
        ),
    ],
    ids=["float64", "complex", "meta", "sparse", "expanded", "interleaved", "lazy", "wrapper"],
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


# Of what a constructor refuses, `test_options.py` has all kinds.
BAD_OPTIONS = [
    ({"lr": -1.0}, "lr"),
    ({"lr": None}, "lr"),
    ({"eps": torch.nan}, "eps"),
    ({"weight_decay": "x"}, "weight_decay"),
    ({"betas": (1.0, 0.9)}, "betas"),
    ({"amsgrad": True}, "amsgrad.*torch.optim.AdamW"),
    ({"capturable": True}, "capturable.*torch.optim.AdamW"),
    ({"differentiable": True}, "differentiable.*torch.optim.AdamW"),
]


@pytest.mark.parametrize("cls", [stepwell.AdamW, stepwell.OffloadAdamW])
@pytest.mark.parametrize(("option", "pattern"), BAD_OPTIONS, ids=str)
def test_bad_option(option, pattern, cls):
    param, other = parameter(3), parameter(3)
    optimizer = cls([{"params": [param]}, {"params": [other]}])
    with pytest.raises(ValueError, match=pattern):
        optimizer.add_param_group({"params": [parameter(3)], **option})
    assert len(optimizer.param_groups) == 2
    optimizer.step()
    before = snapshot(optimizer)
    # A scheduler gone wrong, in the last group.
    optimizer.param_groups[1].update(option)
    with pytest.raises(ValueError, match=pattern):
        optimizer.step()
    assert_same(before, snapshot(optimizer))


@pytest.mark.parametrize("key", ["lr", "betas", "amsgrad"])
def test_what_is_missing_of_a_group_is_named(key):
    optimizer = stepped(parameter(3))
    del optimizer.param_groups[0][key]
    with pytest.raises(ValueError, match=rf"`{key}` of group 0 is missing" + HINTED):
        optimizer.step()


def test_optimizer_wide_options_are_refused_in_a_group():
    with pytest.raises(ValueError, match="`moments` is set for a parameter group"):
        stepwell.AdamW([{"params": [parameter(3)], "moments": "q8"}])


# ---- interrupts ----

INTERRUPTED_PROGRAM = """
import os, signal, sys
import torch, stepwell

params = [torch.nn.Parameter(torch.zeros(1 << 16)) for _ in range(8)]
groups = [{"params": [param], "lr": 1e-3 * (1 + index)} for index, param in enumerate(params)]
options = {"device_bytes_max": 4 * (12 << 16)} if sys.argv[2] == "residents" else {}
optimizer = getattr(stepwell, sys.argv[1])(groups, betas=(0.9, 0.9999), **options)
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


@pytest.mark.parametrize(
    "optimizer", [("AdamW", "host"), ("OffloadAdamW", "host"), ("OffloadAdamW", "residents")]
)
def test_ctrl_c_never_comes_between_two_groups(optimizer):
    process = fork_server.python("-c", INTERRUPTED_PROGRAM, *optimizer, timeout=100)
    assert (process.stdout, process.returncode) == ("whole\n", 0), process.stderr
