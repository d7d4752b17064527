"""stepwell.Adam and stepwell.AdamW against torch's and against a float64 oracle."""

import hypothesis
import pytest
import stepwell
import torch
from hypothesis import strategies as st
from optim_cases import (
    CODECS,
    DTYPES,
    LAYOUT_IDS,
    LAYOUTS,
    Oracle,
    bits,
    master,
    parameter,
    stepped,
)
from stepwell import _core

# float32 arithmetic against float64: some ulps of the parameter per step, and some ulps of the
# update.
ULPS = 8 * 2**-24
# Elements around which kernels and chunks change their ways.
BOUNDARIES = [
    0,
    1,
    15,
    16,
    17,
    31,
    32,
    33,
    63,
    64,
    65,
    129,
    _core.CHUNK_LEN - 1,
    _core.CHUNK_LEN,
    _core.CHUNK_LEN + 1,
]

sizes = st.one_of(st.integers(0, 300), st.sampled_from(BOUNDARIES))
hypers = st.fixed_dictionaries(
    {
        "lr": st.sampled_from([0.0, 1e-5, 1e-3, 0.1]),
        # beta1 at most the root of beta2: beyond, an update has no bound, nor has the error of one.
        "betas": st.sampled_from([(0.9, 0.999), (0.9, 0.95), (0.5, 0.9), (0.0, 0.9), (0.0, 0.0)]),
        "eps": st.sampled_from([1e-8, 1e-3]),
        "weight_decay": st.sampled_from([0.0, 1e-2, 0.3]),
        "maximize": st.booleans(),
    }
)


def tolerance(oracle, steps, lr):
    """Of float32 arithmetic.

    The parameter is rounded each step, and the update (at most some 20 times lr) as well.
    """
    return ULPS * steps * (oracle.param.abs() + 20 * lr * oracle.cancellation + 1e-30)


@hypothesis.given(
    kinds=st.lists(
        st.tuples(sizes, st.sampled_from(DTYPES), st.sampled_from(DTYPES)), min_size=1, max_size=3
    ),
    hyper=hypers,
    decoupled=st.booleans(),
    steps=st.integers(1, 5),
    seed=st.integers(0, 2**32),
)
def test_masters_follow_the_float64_oracle(kinds, hyper, decoupled, steps, seed):
    # A first step at lr 0 without a nonzero gradient only makes state.
    hypothesis.assume(hyper["lr"] > 0 or any(size for size, _, _ in kinds))
    torch.manual_seed(seed)
    params = [torch.nn.Parameter(torch.randn(size).to(dtype)) for size, dtype, _ in kinds]
    oracles = [Oracle(param) for param in params]
    optimizer = (stepwell.AdamW if decoupled else stepwell.Adam)(params, **hyper)
    for _ in range(steps):
        for param, (_, _, grad_dtype), oracle in zip(params, kinds, oracles, strict=True):
            param.grad_dtype = grad_dtype
            param.grad = torch.randn(param.shape).to(grad_dtype)
            oracle.step(param.grad, **hyper, decoupled=decoupled)
        optimizer.step()
    for param, oracle in zip(params, oracles, strict=True):
        difference = (master(optimizer, param).double() - oracle.param).abs()
        assert (difference <= tolerance(oracle, steps, hyper["lr"])).all()
        if param.dtype == torch.bfloat16:
            high = bits(master(optimizer, param)).add(0x8000) >> 16
            assert torch.equal(bits(param), high.to(torch.int16))
        else:
            assert torch.equal(param, master(optimizer, param).to(param.dtype))
        assert optimizer.state[param]["step"] == steps


@pytest.mark.parametrize("grad_dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("moments", CODECS)
def test_a_master_equals_a_float32_parameter_bit_for_bit(moments, dtype, grad_dtype):
    numel = _core.CHUNK_LEN // 16 + 77
    low = torch.nn.Parameter(torch.randn(numel).to(dtype))
    full = torch.nn.Parameter(low.detach().float())
    low.grad_dtype = full.grad_dtype = grad_dtype
    one, two = (stepwell.AdamW([param], lr=1e-3, moments=moments) for param in (low, full))
    for step in range(1000):
        grad = (torch.randn(numel) * 10 ** (step % 7 - 3)).to(grad_dtype)
        low.grad, full.grad = grad, grad.clone()
        one.step()
        two.step()
    assert torch.equal(bits(master(one, low)), bits(full))
    for name, value in two.state[full].items():
        assert torch.equal(bits(one.state[low][name]), bits(value))


@pytest.mark.parametrize(("moments", "error_max"), [("bf16", 0.02), ("q8", 0.05)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rounded_moments_stay_near_the_oracle(dtype, moments, error_max):
    param = parameter(64, 129, dtype=dtype)
    oracle, start = Oracle(param), param.detach().double()
    optimizer = stepwell.AdamW([param], lr=1e-3, moments=moments)
    for _ in range(50):
        param.grad = (torch.randn(param.shape) + 0.5).to(dtype)
        oracle.step(param.grad, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-2)
        optimizer.step()
    moved, expected = master(optimizer, param).double() - start, oracle.param - start
    # Relative L2 error of what 50 steps have done. Unbiased rounding averages out; a wrong decay or
    # scale does not.
    assert (moved - expected).norm() / expected.norm() < error_max


@pytest.mark.parametrize("moments", ["bf16", "q8"])
def test_rounding_depends_on_seed_and_parameter_alone(moments):
    grad = torch.randn(4096)

    def moment(seed, count):
        params = [torch.nn.Parameter(torch.ones(4096)) for _ in range(count)]
        for param in params:
            param.grad = grad.clone()
        optimizer = stepwell.AdamW(params, moments=moments, seed=seed)
        optimizer.step()
        optimizer.step()
        return [
            bits(optimizer.state[param].get("exp_avg", optimizer.state[param].get("exp_avg_codes")))
            for param in params
        ]

    first, second = moment(seed=1, count=2)
    assert not torch.equal(first, second)
    assert torch.equal(moment(seed=1, count=1)[0], first)
    assert not torch.equal(moment(seed=2, count=1)[0], first)


@pytest.mark.parametrize(("dtype", "moments"), LAYOUTS, ids=LAYOUT_IDS)
@pytest.mark.parametrize(
    "strided",
    [
        lambda whole: whole.t(),
        lambda whole: whole.view(2, 3, 4, 5).to(memory_format=torch.channels_last),
        lambda whole: whole[::2, 1:9:3],
    ],
    ids=["transposed", "channels-last", "sliced"],
)
def test_strides_do_not_matter(dtype, moments, strided):
    whole = torch.zeros(12, 10, dtype=dtype)
    place = strided(whole)
    values = torch.randn(place.shape).to(dtype)
    crooked, straight = torch.nn.Parameter(place), torch.nn.Parameter(values.clone())
    crooked.data.copy_(values)
    assert not crooked.is_contiguous()
    one, two = (stepwell.AdamW([param], moments=moments) for param in (crooked, straight))
    for _ in range(3):
        grad = torch.randn(place.shape).to(dtype)
        crooked.grad = torch.empty_like(place).copy_(grad)
        straight.grad = grad
        one.step()
        two.step()
    assert torch.equal(bits(crooked), bits(straight))
    for name, value in two.state[straight].items():
        assert torch.equal(bits(one.state[crooked][name]), bits(value)), name
    if place.shape == (6, 3):
        assert (whole[1::2] == 0).all()


def test_strided_gradients_and_state_work():
    ours, theirs = (torch.nn.Parameter(torch.ones(6, 4)) for _ in range(2))
    optimizer, reference = stepwell.AdamW([ours]), torch.optim.AdamW([theirs])
    for step in range(4):
        grad = torch.randn(4, 6).t()
        ours.grad, theirs.grad = grad, grad.clone()
        optimizer.step()
        reference.step()
        if step == 1:
            state = optimizer.state[ours]
            state["exp_avg"] = state["exp_avg"].t().contiguous().t()
    torch.testing.assert_close(ours, theirs)
    assert not optimizer.state[ours]["exp_avg"].is_contiguous()


def test_lazily_negated_gradient_is_read_as_it_reads():
    grad = torch._neg_view(torch.randn(8))
    ours, theirs = (torch.nn.Parameter(torch.zeros(8)) for _ in range(2))
    ours.grad, theirs.grad = grad, grad.clone()
    assert ours.grad.is_neg()
    stepwell.AdamW([ours]).step()
    torch.optim.AdamW([theirs]).step()
    torch.testing.assert_close(ours, theirs)


def test_large_state_lies_in_buffers_and_keeps_them_alive():
    param = parameter(1 << 19)
    optimizer = stepped(param, steps=1)
    exp_avg = optimizer.state[param]["exp_avg"]
    assert exp_avg.data_ptr() % 4096 == 0
    expected = exp_avg.clone()
    del optimizer, param
    # Memory that was unmapped would fault here.
    assert torch.equal(exp_avg, expected)
