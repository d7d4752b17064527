"""Channels of gradients: squared norms from torch's memory, and what is chosen of them."""

from __future__ import annotations

import pytest
import torch
from stepwell import _core

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Additions of a few hundred float64 of one sign, in another order than torch's.
SUM_RTOL = 1e-12


def view(tensor: torch.Tensor) -> _core.TensorView:
    name = str(tensor.dtype).removeprefix("torch.")
    return _core.TensorView(address=tensor.data_ptr(), dtype=name, numel=tensor.numel())


def sq_norms(grads: list[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    columns = [grad[0].numel() for grad in grads]
    found = [
        (torch.empty(len(grad), dtype=torch.float64), torch.empty(width, dtype=torch.float64))
        for grad, width in zip(grads, columns, strict=True)
    ]
    _core.channel_sq_norms(
        [view(grad) for grad in grads],
        columns=columns,
        row_sq_norms=[view(rows) for rows, _ in found],
        column_sq_norms=[view(of_columns) for _, of_columns in found],
    )
    return found


@pytest.mark.parametrize("dtype", DTYPES)
def test_squared_norms_are_those_of_torch(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    grads = [
        torch.randn(300, 70).to(dtype),
        torch.randn(3, 2049).to(dtype),
        torch.randn(7).to(dtype)[:, None],
        torch.randn(5, 4, 3).to(dtype),
    ]
    for grad, (rows, columns) in zip(grads, sq_norms(grads), strict=True):
        squares = grad.double().flatten(1).square()
        torch.testing.assert_close(rows, squares.sum(1), rtol=SUM_RTOL, atol=0)
        torch.testing.assert_close(columns, squares.sum(0), rtol=SUM_RTOL, atol=0)


def test_a_bad_value_is_in_its_row_and_its_column() -> None:
    grad = torch.ones(4, 20, dtype=torch.bfloat16)
    grad[2, 19] = torch.nan
    [(rows, columns)] = sq_norms([grad])
    assert rows.isnan().nonzero().flatten().tolist() == [2]
    assert columns.isnan().nonzero().flatten().tolist() == [19]


def test_the_largest_scores_are_chosen() -> None:
    scores = torch.tensor([1.0, 5.0, torch.nan, 5.0, 2.0, 5.0], dtype=torch.float64)
    assert _core.top_k(view(scores), 0) == []
    assert _core.top_k(view(scores), 2) == [1, 3], "of equal scores the lowest indices"
    assert _core.top_k(view(scores), 4) == [1, 3, 4, 5]
    assert _core.top_k(view(scores), 5) == [0, 1, 3, 4, 5], "a NaN comes last"


def test_what_does_not_fit_is_named_and_changes_nothing() -> None:
    grad, short = torch.ones(4, 6), torch.full((3,), 7.0, dtype=torch.float64)
    rows, columns = (torch.full((n,), 7.0, dtype=torch.float64) for n in (4, 6))

    def call(**changed: object) -> None:
        arguments = {
            "columns": [6],
            "row_sq_norms": [view(rows)],
            "column_sq_norms": [view(columns)],
        } | changed
        _core.channel_sq_norms([view(grad)], **arguments)  # type: ignore[arg-type]

    with pytest.raises(ValueError, match=r"columns is `5` .* 24 elements"):
        call(columns=[5])
    with pytest.raises(ValueError, match=r"columns has `2` entries, expected 1"):
        call(columns=[6, 6])
    with pytest.raises(ValueError, match=r"row_sq_norms has `3` elements, expected 4"):
        call(row_sq_norms=[view(short)])
    with pytest.raises(ValueError, match=r"column_sq_norms is `float32`, expected float64"):
        call(column_sq_norms=[view(grad[0])])
    with pytest.raises(ValueError, match="overlap"):
        call(row_sq_norms=[view(columns[:4])])
    assert (rows == 7).all()
    assert (columns == 7).all()
    with pytest.raises(ValueError, match=r"k is `4` of 3 scores"):
        _core.top_k(view(short), 4)
    with pytest.raises(ValueError, match=r"scores is `float32`, expected float64"):
        _core.top_k(view(grad), 1)
