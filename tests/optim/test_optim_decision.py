"""What becomes of a step, and what a group's hyper-parameters may be: all cases, without a step."""

import itertools
import math

import pytest
import torch
from stepwell._decision import NONFINITE, Facts, Outcome, decide
from stepwell._hyper import hyper_of

# The first line that holds decides.
DECISIONS = [
    (lambda facts, _: facts.found_inf, Outcome.SKIP),
    (lambda facts, _: facts.has_error, Outcome.REFUSE),
    (lambda facts, policy: facts.is_nonfinite and policy == "raise", Outcome.REFUSE),
    (lambda facts, policy: facts.is_nonfinite and policy == "skip", Outcome.SKIP),
    (lambda facts, _: facts.is_first_at_lr_0 and not facts.is_nonzero, Outcome.MAKE_STATE),
    (lambda *_: True, Outcome.STEP),
]


@pytest.mark.parametrize("nonfinite", NONFINITE)
def test_every_case_is_decided(nonfinite):
    for values in itertools.product((False, True), repeat=len(Facts._fields)):
        facts = Facts(*values)
        expected = next(outcome for holds, outcome in DECISIONS if holds(facts, nonfinite))
        assert decide(facts, nonfinite) is expected, facts


@pytest.mark.parametrize("nonfinite", NONFINITE)
def test_a_step_of_which_nothing_is_known_is_taken(nonfinite):
    assert decide(Facts(), nonfinite) is Outcome.STEP
    # What makes state takes a gradient that is known to be 0.
    assert decide(Facts(is_first_at_lr_0=True), nonfinite) is Outcome.STEP


# ---- hyper-parameters ----

GROUP = {
    "lr": 0.1,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "weight_decay": 0.01,
    "amsgrad": False,
    "maximize": False,
    "capturable": False,
    "differentiable": False,
    "decoupled_weight_decay": True,
    "bias_correction": True,
}


class Number:
    """As numpy's: it is no float, and has one."""

    def __float__(self):
        return 0.5


@pytest.mark.parametrize("key", ["lr", "eps", "weight_decay"])
@pytest.mark.parametrize("value", [0, 0.0, 2, 0.5, Number(), torch.tensor(0.5), torch.ones(1, 1)])
def test_numbers_of_any_kind(key, value):
    found = getattr(hyper_of({**GROUP, key: value}, "group 3"), key)
    assert type(found) is float
    assert found == float(value)


@pytest.mark.parametrize("key", ["lr", "eps", "weight_decay"])
@pytest.mark.parametrize(
    ("value", "said"),
    [
        (-1e-9, "`-1e-09`, expected a finite number, 0 or more"),
        (math.inf, "`inf`, expected a finite number, 0 or more"),
        (math.nan, "`nan`, expected a finite number, 0 or more"),
        (torch.tensor(-1.0), r"`-1\.0`, expected a finite number"),
        ("0.1", "`'0.1'` (`str`), expected a number"),
        (None, "`None` (`NoneType`), expected a number"),
        (1j, "`1j` (`complex`), expected a number"),
        (torch.tensor(1j), "expected a number"),
        (torch.ones(2), "has the shape `(2,)`, expected one number"),
        (torch.ones(0), "has the shape `(0,)`, expected one number"),
    ],
)
def test_what_is_no_number_is_refused(key, value, said):
    with pytest.raises(ValueError, match=f"`{key}` of group 3 ") as raised:
        hyper_of({**GROUP, key: value}, "group 3")
    assert said.replace("\\", "") in str(raised.value)


@pytest.mark.parametrize(
    "betas", [(0, 0), [0.5, 0.25], (torch.tensor(0.5), 0.25), torch.tensor([0.5, 0.25])]
)
def test_betas_of_any_kind(betas):
    assert hyper_of({**GROUP, "betas": betas}, "group 0").betas == tuple(map(float, betas))


@pytest.mark.parametrize(
    ("betas", "said"),
    [
        ((1.0, 0.5), "two numbers from 0 to below 1"),
        ((0.5, 1), "two numbers from 0 to below 1"),
        ((-0.1, 0.5), "two numbers from 0 to below 1"),
        ((0.5,), "two numbers from 0 to below 1"),
        ((0.5, 0.5, 0.5), "two numbers from 0 to below 1"),
        ("99", r"hint: betas=(0.9, 0.999)"),
        (0.9, r"hint: betas=(0.9, 0.999)"),
        ((0.9, None), "`None` (`NoneType`), expected a number"),
    ],
)
def test_what_are_no_betas_is_refused(betas, said):
    with pytest.raises(ValueError, match="`betas` of group 0") as raised:
        hyper_of({**GROUP, "betas": betas}, "group 0")
    assert said in str(raised.value)


@pytest.mark.parametrize("key", GROUP)
def test_what_is_missing_is_named(key):
    group = {name: value for name, value in GROUP.items() if name != key}
    with pytest.raises(ValueError, match=rf"`{key}` of group 1 is missing(.|\n)*add_param_group"):
        hyper_of(group, "group 1")


@pytest.mark.parametrize("key", ["amsgrad", "capturable", "differentiable"])
def test_what_is_not_done_is_refused_with_what_does_it(key):
    with pytest.raises(ValueError, match=rf"`{key}` of group 0(.|\n)*AdamW\({key}=True\)"):
        hyper_of({**GROUP, key: True}, "group 0")


@pytest.mark.parametrize("seed", [None, 1.0, "1"])
def test_seeds_are_integers(seed):
    assert hyper_of({**GROUP, "seed": 7}, "group 0") == hyper_of(GROUP, "group 0")
    with pytest.raises(ValueError, match=r"`seed` of group 0(.|\n)*expected an integer"):
        hyper_of({**GROUP, "seed": seed}, "group 0")


@pytest.mark.parametrize(
    ("key", "field"),
    [
        ("maximize", "maximize"),
        ("decoupled_weight_decay", "decoupled"),
        ("bias_correction", "bias_correction"),
    ],
)
@pytest.mark.parametrize("value", [False, True, 0, 1])
def test_switches(key, field, value):
    assert getattr(hyper_of({**GROUP, key: value}, "group 0"), field) is bool(value)
