"""Selected channels that share one budget: those of the whole model that capture most per byte."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from selected_models import DEVICE, assert_same, drawn, pair, step_with
from stepwell import Deferred, OffloadAdamW, _core
from stepwell._tensors import view
from torch import nn

STATE_NBYTES, INDEX_NBYTES, ALIGN_BYTES = 12, 4, 64


def nets() -> nn.Module:
    """Matrices of one size."""
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(24, 24, bias=False) for _ in range(4)))
    return net.to(DEVICE, torch.bfloat16)


def step_of(model: nn.Module, optimizer: OffloadAdamW, gradients: list[torch.Tensor]) -> None:
    x = torch.ones(2, 24, device=DEVICE, dtype=torch.bfloat16)
    model(x).float().sum().backward()
    for param, grad in zip(model.parameters(), gradients, strict=True):
        param.grad = grad.to(param)
    optimizer.step()
    optimizer.zero_grad()


def lags(
    model: nn.Module, optimizer: OffloadAdamW, gradients: list[torch.Tensor], steps: int
) -> list[tuple[int, int]]:
    """Of each matrix how many rows, and columns, a forward reads with all updates."""
    exact_model = nets()
    exact = OffloadAdamW(exact_model.parameters(), lr=1e-2)
    for _ in range(steps):
        step_of(model, optimizer, gradients)
        step_of(exact_model, exact, gradients)
    model(torch.ones(2, 24, device=DEVICE, dtype=torch.bfloat16))
    found = []
    for param, newest in zip(model.parameters(), exact_model.parameters(), strict=True):
        is_same = param.detach() == newest.detach()
        found.append((int(is_same.all(1).sum()), int(is_same.all(0).sum())))
    return found


def test_where_the_norm_is_more_is_selected() -> None:
    """As many channels as `fraction` takes, all of the matrices whose gradients are large."""
    model = nets()
    deferred = Deferred(interval=4, fraction=0.25, scope="global", predict=False, reselect=4)
    optimizer = OffloadAdamW(model.parameters(), lr=1e-2, deferred=deferred)
    gradients = [torch.full((24, 24), 0.01 * (1 + index)) for index in range(4)]
    gradients[1][:, :20] = 7.0
    gradients[3][5:8] = 100.0
    found = lags(model, optimizer, gradients, 6)
    # 24 channels at .25; one is lost to the alignment of what four matrices may have.
    assert found == [(0, 0), (0, 20), (0, 0), (3, 0)]
    assert optimizer.deferral is not None
    assert optimizer.deferral.captured_share > 0.99


def test_each_exact_step_shares_the_budget_anew() -> None:
    model = nets()
    deferred = Deferred(interval=2, budget_bytes=8 * 1024, scope="global", predict=False)
    optimizer = OffloadAdamW(model.parameters(), lr=1e-2, deferred=deferred)
    gradients = [torch.full((24, 24), 0.01) for _ in range(4)]
    gradients[2] *= 100
    step_of(model, optimizer, gradients)
    step_of(model, optimizer, gradients)
    engine = optimizer._engine
    assert engine is not None and engine.selector is not None
    # All of one, and what is left of the first of those that are alike.
    assert engine.selector._counts == {0: (3, 3), 1: (0, 0), 2: (24, 24), 3: (0, 0)}
    optimizer.state_dict()
    gradients[2] /= 100
    gradients[1] *= 100
    step_of(model, optimizer, gradients)
    assert engine.selector._counts == {0: (3, 3), 1: (24, 24), 2: (0, 0), 3: (0, 0)}


def test_a_step_that_selects_nothing_is_followed_by_one_that_shares_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    selected, exact = pair(Deferred(interval=3, scope="global", fraction=0.3, warmup_steps=2))
    for step in range(1, 10):
        with monkeypatch.context() as patch:
            if step in (1, 5):
                # As where the model is compiled.
                patch.setattr(selected[1], "_is_seen", lambda: False)
            for each in (selected, exact):
                step_with(*each, step)
        engine = selected[1]._engine
        assert engine is not None and engine.selector is not None
        matrices = [one.segment for one in engine._core.selectable() if not one.nbytes]
        is_shared = any(any(engine.selector._counts.get(each, ())) for each in matrices)
        assert is_shared == (step not in (1, 5)), step
        assert bool(engine.pending_params) == (step not in (1, 2, 5, 6)), step
    assert_same(selected, exact)


def test_a_budget_for_all_is_an_exact_run() -> None:
    selected, exact = pair(Deferred(interval=3, scope="global", budget_bytes=1 << 30))
    for step in range(1, 12):
        for each in (selected, exact):
            step_with(*each, step)
    assert selected[1].timing["selected_bytes"] < 1 << 20
    model = selected[0]
    model.train()
    weights = [param.detach().clone() for param in model.parameters()]
    assert_same(selected, exact)
    for weight, param in zip(weights, model.parameters(), strict=True):
        assert torch.equal(weight, param)


def test_a_step_that_turns_out_to_be_exact_is_followed_by_one_that_shares_the_budget() -> None:
    """The memory of a parameter without a gradient is held by the program, and lands late."""
    model = nets()
    deferred = Deferred(interval=2, budget_bytes=8 * 1024, scope="global", predict=False)
    optimizer = OffloadAdamW(model.parameters(), lr=1e-2, deferred=deferred)
    gradients = [torch.full((24, 24), 0.01) for _ in range(4)]
    for _ in range(4):
        step_of(model, optimizer, gradients)
    engine = optimizer._engine
    assert engine is not None and engine.selector is not None
    counts = engine.selector._counts
    assert engine.pending_params and any(map(any, counts.values()))
    x = torch.ones(2, 24, device=DEVICE, dtype=torch.bfloat16)
    model(x).float().sum().backward()
    last = model[3].weight
    last.grad = None
    held = last.data
    optimizer.step()
    optimizer.zero_grad()
    assert not engine.pending_params
    step_of(model, optimizer, gradients)
    assert sum(map(max, counts.values())) >= 24, held.shape


@pytest.mark.parametrize("options", [{"budget_bytes": 1 << 30}, {"fraction": 1.0}])
def test_all_of_matrices_that_fill_their_places_is_selected(options: dict[str, Any]) -> None:
    """No end of a place is unused, so that no channel is lost to what it might take."""
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False, device=DEVICE) for _ in range(3)))
    exact_model = copy.deepcopy(model)
    deferred = Deferred(interval=4, scope="global", predict=False, **options)
    selected = OffloadAdamW(model.parameters(), lr=1e-2, deferred=deferred)
    exact = OffloadAdamW(exact_model.parameters(), lr=1e-2)
    for step in range(1, 8):
        outputs = []
        for each, optimizer in ((model, selected), (exact_model, exact)):
            outputs.append(each(torch.ones(2, 64, device=DEVICE)))
            outputs[-1].sum().backward()
            for index, param in enumerate(each.parameters()):
                param.grad = drawn(param, step, index)
            optimizer.step()
            optimizer.zero_grad()
        assert torch.equal(*outputs), step


def test_a_budget_that_is_no_integer_is_named() -> None:
    with pytest.raises(ValueError, match=r"`budget_bytes` is `2000000000.0`, expected an integer"):
        Deferred(scope="global", budget_bytes=2e9)  # type: ignore[arg-type]


def test_a_budget_too_small_for_norms_and_biases_is_refused() -> None:
    with pytest.raises(ValueError, match=r"budget_bytes is `1000`, expected at least 1536"):
        pair(Deferred(interval=3, scope="global", budget_bytes=1000))


def shapes_of(count: int) -> st.SearchStrategy[list[tuple[int, int]]]:
    return st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=count)


@given(shapes=shapes_of(6), budget_bytes=st.integers(0, 60_000), seed=st.integers(0, 99))
def test_what_is_granted_is_what_a_sort_finds(
    shapes: list[tuple[int, int]], budget_bytes: int, seed: int
) -> None:
    """Greedy by squared norm per byte, first come first where equal."""
    random = np.random.default_rng(seed)
    numels = [rows * row_len for rows, row_len in shapes]
    selectable, _engine = selectables(numels, [row_len for _, row_len in shapes])
    # Some equal, some 0.
    norms = [random.integers(0, 9, size).astype(np.float32) for shape in shapes for size in shape]
    flat = torch.from_numpy(np.concatenate(norms))
    found = _core.grant_channels(
        view(flat),
        selectable,
        budget_bytes=budget_bytes,
    )
    places = 0
    ranked = []
    for index, ((rows, row_len), (by_columns, *_)) in enumerate(zip(shapes, found, strict=True)):
        scores = norms[2 * index + by_columns].astype(float) ** 2
        nbytes = channel_nbytes(rows, row_len, by_columns=by_columns)
        ranked += [(-score / nbytes, index, at, nbytes) for at, score in enumerate(scores)]
        places += -(-len(scores) * nbytes // ALIGN_BYTES) * ALIGN_BYTES
    usable = max(budget_bytes - len(shapes) * (ALIGN_BYTES - 1), 0)
    if places <= budget_bytes:
        usable = places
    expected: list[list[int]] = [[] for _ in shapes]
    for _, index, at, nbytes in sorted(ranked):
        if nbytes > usable:
            break
        usable -= nbytes
        expected[index].append(at)
    for index, (by_columns, channels, captured, _, row_count, column_count) in enumerate(found):
        (rows, row_len), chosen = shapes[index], sorted(expected[index])
        assert channels == chosen
        assert captured == (norms[2 * index + by_columns][chosen].astype(float) ** 2).sum()
        nbytes = len(chosen) * channel_nbytes(rows, row_len, by_columns=by_columns)
        for count, most, axis in ((row_count, rows, False), (column_count, row_len, True)):
            assert count == min(most, nbytes // channel_nbytes(rows, row_len, by_columns=axis))


def channel_nbytes(rows: int, row_len: int, *, by_columns: bool) -> int:
    return STATE_NBYTES * (rows if by_columns else row_len) + INDEX_NBYTES


def selectables(
    numels: list[int], row_lens: list[int]
) -> tuple[list[_core.Selectable], _core.OffloadEngine]:
    """What an engine says of matrices, and the engine."""
    dtypes = ["float32"] * len(numels)
    gradients, _ = _core.deferral_nbytes(numels, dtypes, 1)
    device, staging = _core.selection_nbytes(numels, dtypes, 1, row_lens, budget_bytes=1 << 30)
    memory = torch.empty(device + 64, dtype=torch.uint8)
    address = -(-memory.data_ptr() // 64) * 64
    engine = _core.OffloadEngine(
        "cpu",
        numels,
        threads=1,
        generations=2,
        interval=1,
        dtypes=dtypes,
        gradients=_core.Buffer(gradients),
        row_lens=row_lens,
        budget_bytes=1 << 30,
        selection=(address, memory),
        staging=_core.Buffer(staging),
    )
    return engine.selectable(), engine
