"""What a program has written to a weight between two steps counts, however it was written.

Beside `AdamW`, whose weights are the parameters themselves: to the bit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from stepwell import AdamW, Deferred, OffloadAdamW
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

# Odd numbers of elements: words of 8 bytes that are not whole, at their ends.
SHAPES = [(5, 3), (7,), (1,), (64, 33)]


def made(
    kind: type[AdamW | OffloadAdamW],
    dtype: torch.dtype,
    *,
    has_masters: bool = False,
    **options: Any,
) -> Any:
    """Parameters with their optimizer: of `AdamW` in host memory, else beside the device."""
    torch.manual_seed(0)
    device = "cpu" if kind is AdamW else DEVICE
    kept = torch.float32 if has_masters else dtype
    params = [nn.Parameter(torch.randn(shape).to(dtype).to(device, kept)) for shape in SHAPES]
    return params, kind(params, **options)


def by_data(param: nn.Parameter) -> None:
    param.data.mul_(0.5)


def by_an_array(param: nn.Parameter) -> None:
    memory = param.detach().view(torch.uint8 if param.dim() > 1 else param.dtype)
    memory.view(-1)[-1:].add_(1)


def by_new_memory(param: nn.Parameter) -> None:
    param.data = param.data + 0.25


def by_an_operation(param: nn.Parameter) -> None:
    with torch.no_grad():
        param.clamp_(-0.5, 0.5)


def by_a_storage(param: nn.Parameter) -> None:
    other = torch.empty(0, dtype=param.dtype, device=param.device)
    other.set_(param.untyped_storage(), 0, (1,), (1,))
    other.fill_(2.0)


WAYS = [by_data, by_an_array, by_new_memory, by_an_operation, by_a_storage]


def bits(params: list[nn.Parameter]) -> list[list[int]]:
    flat = [param.detach().cpu().contiguous().view(-1) for param in params]
    return [each.view(torch.uint8).tolist() for each in flat]


def run(
    kind: type[AdamW | OffloadAdamW],
    dtype: torch.dtype,
    write: Callable[[nn.Parameter], None],
    *,
    when: str,
    lr: float = 0.1,
    **options: Any,
) -> list[list[int]]:
    """Four steps, of which some have a write before the gradient, or behind it.

    The last parameter gets no gradient in the second step. `AdamW` steps bfloat16 by masters in
    fp32, of which the writes change what they change of the weights.
    """
    has_masters = kind is AdamW and dtype is torch.bfloat16
    params, optimizer = made(kind, dtype, has_masters=has_masters, lr=lr, **options)
    if has_masters:
        write = write_of_masters(write)
    for step in range(4):
        for at, param in enumerate(params):
            if when == "before" and step in (0, 2):
                write(param)
            torch.manual_seed(10 * step + at)
            param.grad = torch.randn(param.shape).to(dtype).to(param)
            if step == 1 and at == len(params) - 1:
                param.grad = None
            if when == "behind" and step == 1:
                write(param)
        optimizer.step()
    if isinstance(optimizer, OffloadAdamW):
        optimizer.synchronize()
    return bits([param.to(dtype) for param in params])


def write_of_masters(write: Callable[[nn.Parameter], None]) -> Callable[[nn.Parameter], None]:
    """A write to the bfloat16 weight of which a parameter is the fp32 master.

    What it changes is the master there; all else of the master stays.
    """

    def written(master: nn.Parameter) -> None:
        weight = nn.Parameter(master.detach().bfloat16())
        before = weight.detach().clone()
        write(weight)
        differs = weight.detach().view(torch.int16) != before.view(torch.int16)
        master.data[differs] = weight.detach()[differs].float()

    return written


@pytest.mark.parametrize("when", ["before", "behind"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("write", WAYS)
def test_a_write_counts_however_it_was_made(
    write: Callable[[nn.Parameter], None], dtype: torch.dtype, when: str
) -> None:
    expected = run(AdamW, dtype, write, when=when)
    assert run(OffloadAdamW, dtype, write, when=when) == expected


@pytest.mark.parametrize("options", [{}, {"device_bytes_max": 1 << 20}], ids=["host", "device"])
def test_a_mask_behind_every_step_stalls_nothing_else(options: dict[str, Any]) -> None:
    """Steps of a tenth of what bfloat16 tells apart add up where the mask writes nothing."""

    def by_a_mask(param: nn.Parameter) -> None:
        param.data.view(-1)[::3] = 0.0

    results = []
    for kind, own in ((AdamW, {}), (OffloadAdamW, options)):
        params, optimizer = made(kind, torch.bfloat16, has_masters=kind is AdamW, lr=1e-4, **own)
        write = write_of_masters(by_a_mask) if kind is AdamW else by_a_mask
        before = bits(params)
        for _ in range(60):
            for param in params:
                param.grad = torch.ones_like(param)
            optimizer.step()
            for param in params:
                write(param)
        results.append(bits([param.bfloat16() for param in params]))
        assert before != results[-1]
    assert results[0] == results[1]


def test_the_same_bits_written_again_are_no_write() -> None:
    # Trailing bits of the master stay.
    results = []
    for writes in (False, True):
        params, optimizer = made(OffloadAdamW, torch.bfloat16, lr=1e-3)
        for _ in range(4):
            for param in params:
                param.grad = torch.full_like(param, 0.5)
                if writes:
                    param.data = param.data.clone()
            optimizer.step()
        optimizer.synchronize()
        results.append(bits(params))
    assert results[0] == results[1]


def test_a_write_while_updates_are_deferred_is_refused() -> None:
    model = nn.Linear(33, 5, device=DEVICE)
    optimizer = OffloadAdamW(model, lr=0.1, deferred=Deferred(interval=4))
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(2, 33, device=DEVICE)).sum().backward()
        optimizer.step()
    model(torch.ones(2, 33, device=DEVICE)).sum().backward()
    # Memory that the program kept: nothing but the contents tells of this.
    by_a_storage(model.weight)
    with pytest.raises(ValueError, match="the writes are lost"):
        optimizer.step()
