"""Partitions of ZeRO, without DeepSpeed, whose state is on a volume or in host memory."""

import stepwell
import torch
from insides import make_partitions_late, runs_of
from stepwell import _core
from stepwell.deepspeed.zero.operands import Operands
from stepwell.deepspeed.zero.partition import Partition
from stepwell.deepspeed.zero.partitions import Partitions
from stepwell.deepspeed.zero.swapped import SwappedPartitions

BF16, FP32 = torch.bfloat16, torch.float32
SIZE = _core.CHUNK_LEN
# Three chunks, the last of which is short; none; a part of one.
NUMELS = (2 * SIZE + 5, 0, 100)
BUFFERS_BYTES = 1_800_000
"""Host memory that buffers take at least, with no room for the state of a chunk beside them."""
STATE_BYTES = 10
"""Of an element: moments, and what a master has beside its bf16 weight, but for a bit or so."""
MOMENTS = ("exp_avg", "exp_avg_sq")
# Of the first master: first element and number of elements.
PIECES = [(0, 3), (SIZE - 1, 2), (2 * SIZE, 5)]


class Run:
    """Steps of partitions whose state is on a volume; or in host memory, for `volume=None`.

    Args:
        room: bytes of host memory for state and buffers; None: what is free.
        late: whether a step begins when it is waited for.
        is_offloaded: whether weights are in host memory, of the program's.
    """

    def __init__(
        self,
        volume=None,
        *,
        numels=NUMELS,
        weight=BF16,
        kind=stepwell.AdamW,
        room=BUFFERS_BYTES,
        seed=0,
        identity="a model",
        rank=None,
        late=False,
        is_offloaded=False,
        **options,
    ):
        generator = torch.Generator().manual_seed(seed)
        self.numels = numels
        self.weights = [torch.randn(each, generator=generator).to(weight) for each in numels]
        self.masters = [torch.empty(0, requires_grad=True) for _ in numels]
        self.optimizer = kind([{"params": [each]} for each in self.masters], lr=0.5, **options)
        self.operands = Operands(self.optimizer, 0)
        self.swapped = volume and SwappedPartitions(
            volume,
            new_state=self.operands.new_state,
            identity=identity,
            rank=rank,
            threads=1,
        )
        self.operands.swapped = self.swapped
        beside = sum(each.nbytes * 2 for each in self.weights)
        self.partitions = Partitions(
            [
                Partition(
                    master,
                    weight,
                    weight.dtype,
                    self.operands.moments_bytes(weight.to("meta", master.dtype)),
                    is_offloaded,
                )
                for master, weight in zip(self.masters, self.weights, strict=True)
            ],
            device=torch.device("cpu"),
            threads=1,
            is_pinned=False,
            swapped=self.swapped,
            host_bytes_max=None if volume is None or room is None else beside + room,
        )
        self.operands.forget_unused_volume()
        self.operands.resume(self.partitions.resumed, self.masters)
        self.late = None
        if late:
            self.late = make_partitions_late(self.partitions)

    def step(self, number, *, before_submit=None):
        """Takes a step of gradients that depend on its number, and does not wait for it."""
        generator = torch.Generator().manual_seed(1000 + number)
        self.partitions.end_last_step()
        for run, numel in zip(runs_of(self.partitions), self.numels, strict=True):
            self.partitions.gradients.of(run).copy_(torch.randn(numel, generator=generator))
        operands = {
            group: self.operands.of(group, group, master)
            for group, master in enumerate(self.masters)
        }
        prepared = self.partitions.prepare(operands, self.weights)
        if before_submit is not None:
            before_submit()
        begun = self.operands.begun(operands.values())
        self.partitions.submit(prepared, grad_scale=1.0, begun=begun)
        self.partitions.forget()

    def steps(self, count, first=0):
        """Takes steps, and waits for them."""
        for number in range(first, first + count):
            self.step(number)
        self.partitions.finish()
        return self

    def moved(self):
        """Bytes read from drives and written."""
        return [self.partitions.timing()[key] for key in ("bytes_read", "bytes_written")]

    def read(self):
        """Bytes that the drives have read."""
        return self.moved()[0]

    def state(self, group=0):
        return self.optimizer.state[self.masters[group]]

    def found(self):
        """Weights, masters; moments and counts of what has elements."""
        self.partitions.finish()
        return [
            *(each.clone() for each in self.weights),
            *(each.detach().clone() for each in self.masters),
            *(
                torch.as_tensor(value).clone()
                for master, weight in zip(self.masters, self.weights, strict=True)
                if weight.numel() > 0
                for _, value in sorted(self.optimizer.state[master].items())
            ),
        ]

    def end(self):
        self.partitions.end()


def assert_same(run, other):
    found, expected = run.found(), other.found()
    assert [each.dtype for each in found] == [each.dtype for each in expected]
    assert all(map(torch.equal, found, expected))


def pieces_of(run, runs=PIECES):
    """Pieces of the first master: those that are good after every step; or views of it."""
    found = run.partitions.pieces(0, runs)
    if found is not None:
        return found
    return [run.masters[0].detach().narrow(0, begin, numel) for begin, numel in runs]
