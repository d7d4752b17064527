"""Which share of the squared norms of gradients a tenth of them captures, by the form of a choice.

    python benches/captured_share.py [--hidden-size 256] [--layers 4] [--fraction 0.1] [--text FILE]
        [--then FILE]

A small language model trains from nothing on bytes of text, and then goes on with another one at a
thirtieth of the lr, as fine-tuning does. Both are exact, in bfloat16 on a GPU and in float32 on a
CPU. Each has eight selections, of which a row has the mean. Matrices alone are looked at.

- rows or columns: of each segment (4 Mi elements) those with the largest norms, rows or columns,
  whichever have more. This is what `Deferred(fraction=...)` chooses.
- chunks of each matrix, chunks of all: 65,536 elements one after the other, by their norms.

"of all" is over the squared norm of all matrices; "of each" is the mean of each matrix's own share.
AdamW moves a matrix whose gradients are small as far as one whose gradients are large. So the
second says what of the steps is taken at once. Behind "held" is the mean over the steps until the
next selection, of what was chosen before them.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from itertools import islice
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING

import torch
from stepwell._core import CHUNK_LEN
from stepwell.cli._llama import LlamaShape, read_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

SELECTIONS, RESELECT = 8, 16
SEGMENT_LEN = 4 << 20


def top(norms: torch.Tensor, fraction: float) -> torch.Tensor:
    """Which of these are the largest: a boolean of each."""
    chosen = torch.zeros_like(norms, dtype=torch.bool)
    chosen[norms.topk(max(1, round(fraction * len(norms)))).indices] = True
    return chosen


def segments(squares: torch.Tensor) -> Iterator[torch.Tensor]:
    """Whole rows of a matrix, as many as are in a segment."""
    rows, row_len = squares.shape
    count = -(-rows * row_len // SEGMENT_LEN)
    return iter(squares.tensor_split(count))


def by_channels(matrices: list[torch.Tensor], fraction: float) -> list[torch.Tensor]:
    """Of each matrix the elements that rows or columns choose."""
    masks = []
    for squares in matrices:
        blocks = []
        for block in segments(squares):
            rows, columns = (top(block.sum(dim), fraction) for dim in (1, 0))
            row_wise, column_wise = block[rows].sum(), block[:, columns].sum()
            mask = rows[:, None] if row_wise >= column_wise else columns[None, :]
            blocks.append(mask.expand_as(block))
        masks.append(torch.cat(blocks))
    return masks


def chunk_norms(squares: torch.Tensor) -> torch.Tensor:
    """The sum of each chunk of a matrix."""
    flat = squares.flatten()
    padded = torch.nn.functional.pad(flat, (0, -len(flat) % CHUNK_LEN))
    return padded.view(-1, CHUNK_LEN).sum(1)


def of_chunks(matrices: list[torch.Tensor], chosen: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The elements of the chunks that are chosen."""
    return [
        each.repeat_interleave(CHUNK_LEN)[: squares.numel()].view_as(squares)
        for squares, each in zip(matrices, chosen, strict=True)
    ]


def by_chunks_of_each(matrices: list[torch.Tensor], fraction: float) -> list[torch.Tensor]:
    """Of each matrix the elements that its own largest chunks have."""
    return of_chunks(matrices, [top(chunk_norms(squares), fraction) for squares in matrices])


def by_chunks_of_all(matrices: list[torch.Tensor], fraction: float) -> list[torch.Tensor]:
    """Of each matrix the elements that are among the largest chunks of the model."""
    norms = [chunk_norms(squares) for squares in matrices]
    chosen = top(torch.cat(norms), fraction)
    return of_chunks(matrices, torch.split(chosen, [len(each) for each in norms]))


FORMS: dict[str, Callable[[list[torch.Tensor], float], list[torch.Tensor]]] = {
    "rows or columns": by_channels,
    "chunks of each matrix": by_chunks_of_each,
    "chunks of all": by_chunks_of_all,
}


def shares(matrices: list[torch.Tensor], masks: list[torch.Tensor]) -> torch.Tensor:
    """What is chosen of the sum of all, and in the mean of each matrix's own."""
    chosen = torch.stack(
        [(squares * mask).sum() for squares, mask in zip(matrices, masks, strict=True)]
    )
    sums = torch.stack([squares.sum() for squares in matrices])
    return torch.stack([chosen.sum() / sums.sum(), (chosen / sums).mean()]).cpu()


def train(
    model: torch.nn.Module, batches: Iterator[torch.Tensor], lr: float, fraction: float
) -> dict[str, torch.Tensor]:
    """Of each form its shares when it was chosen (a row), and until the next choice (a row)."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, fused=True)
    device = next(model.parameters()).device
    chosen, held, losses = defaultdict(list), defaultdict(list), []
    masks: dict[str, list[torch.Tensor]] = {}
    for step, batch in enumerate(islice(batches, SELECTIONS * RESELECT)):
        loss = model(input_ids=batch.to(device), labels=batch.to(device)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        grads = [param.grad for param in model.parameters() if param.grad is not None]
        matrices = [grad.float().square() for grad in grads if grad.dim() == 2]
        for form, choose in FORMS.items():
            if step % RESELECT == 0:
                masks[form] = choose(matrices, fraction)
                chosen[form].append(shares(matrices, masks[form]))
            else:
                held[form].append(shares(matrices, masks[form]))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    print(f"  loss {mean(losses[:4]):.3f} to {mean(losses[-4:]):.3f}")
    return {
        form: torch.stack([torch.stack(each[form]).mean(0) for each in (chosen, held)])
        for form in FORMS
    }


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fraction", type=float, default=0.1)
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--then", type=Path, help="what it is fine-tuned on")
    args = parser.parse_args()
    shape = LlamaShape(
        hidden_size=args.hidden_size,
        num_hidden_layers=args.layers,
        sequence_length=256,
        batch_size=16,
    )
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = shape.build(seed=0).to(device, dtype)
    for name, path, lr in (("from nothing", args.text, 3e-4), ("fine-tuned", args.then, 1e-5)):
        text = read_text(path, bytes_min=2 * shape.sequence_length)
        print(name)
        found = train(model, text.batches(shape, seed=0), lr, args.fraction)
        for form, share in found.items():
            of_best = share[0] / found["rows or columns"][0]
            texts = [
                f"{label} {chosen:.3f}, held {held:.3f} ({ratio:.2f} of rows or columns)"
                for label, chosen, held, ratio in zip(
                    ("of all", "of each"), *share.tolist(), of_best.tolist(), strict=True
                )
            ]
            print(f"  {form:24} {'; '.join(texts)}")


if __name__ == "__main__":
    main()
