"""Partitions of ZeRO in host memory, without DeepSpeed, their gradients and their steps."""

import stepwell
import torch
from insides import runs_of
from stepwell.deepspeed.zero.operands import Operands
from stepwell.deepspeed.zero.partition import Partition
from stepwell.deepspeed.zero.partitions import Partitions

BF16, FP32 = torch.bfloat16, torch.float32
PRECISE = 1.0009765625
"""Not a bf16 number."""
HUGE = 2.0**100
"""Its square is no float32 number."""


def partition(numel, *, grad=BF16, master=FP32, weight=BF16, moments_bytes=0, offloaded=False):
    held = torch.empty(0, dtype=master, requires_grad=True)
    return Partition(held, torch.ones(numel, dtype=weight), grad, moments_bytes, offloaded)


def opened(*partitions, **options):
    settings = {"device": torch.device("cpu"), "threads": 1, "is_pinned": False, **options}
    return Partitions(list(partitions), **settings)


def full(numel, value, dtype=BF16):
    return torch.full((numel,), value, dtype=dtype)


class Steps:
    """Takes steps of partitions with Stepwell's AdamW."""

    def __init__(self, partitions, made):
        self.partitions, self.masters = partitions, [each.master for each in made]
        self.weights = [each.weight for each in made]
        self.optimizer = stepwell.AdamW([{"params": [each]} for each in self.masters], lr=0.5)
        self.operands = Operands(self.optimizer, 0)

    def take(self, grad_scale=1.0):
        self.partitions.end_last_step()
        operands = {
            group: self.operands.of(group, group, master)
            for group, master in enumerate(self.masters)
        }
        prepared = self.partitions.prepare(operands, self.weights)
        begun = self.operands.begun(operands.values())
        self.partitions.submit(prepared, grad_scale=grad_scale, begun=begun)
        self.partitions.forget()

    def moments(self):
        self.partitions.finish()
        return [self.optimizer.state[master]["exp_avg"] for master in self.masters]


def stepped(partitions):
    """What the coming step would take."""
    partitions.finish()
    partitions.gradients.complete(partitions.engine.core)
    partitions.arrive()
    return [partitions.gradients.of(run).tolist() for run in runs_of(partitions)]
