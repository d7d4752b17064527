"""Ranks that run functions for the tests of sharded parameters, and what they shard.

They are forked from a process that has imported torch, which takes seconds.
"""

import faulthandler
import queue
import traceback
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

# For a function on all ranks. A collective that a rank does not join fails earlier, by itself.
RANK_SECONDS_MAX = 90
COLLECTIVE_SECONDS_MAX = 30
# Until torch is imported, and all ranks have found one another.
START_SECONDS_MAX = 120
# An optimizer imports the second module. Nothing of Stepwell is among them: tests are about it.
IMPORTS = [
    "torch",
    "torch._dynamo",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
]


def _serve(rank, world_size, device, store, tasks, results):
    if device == "cuda":
        torch.cuda.set_device(rank)
        torch.set_default_device(torch.device("cuda", rank))
    dist.init_process_group(
        "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl",
        init_method=f"file://{store}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=COLLECTIVE_SECONDS_MAX),
    )
    results.put((rank, None, "started"))
    while (task := tasks.get()) is not None:
        function, arguments = task
        faulthandler.dump_traceback_later(RANK_SECONDS_MAX * 0.9)
        try:
            results.put((rank, None, function(*arguments)))
        except Exception:  # noqa: BLE001 - told to the test
            results.put((rank, traceback.format_exc(), None))
        faulthandler.cancel_dump_traceback_later()
    dist.destroy_process_group()


class Ranks:
    """Processes that are the ranks of one process group, started anew after one has hung.

    With the device `cuda` each has a GPU of its own, on which it makes its tensors.
    """

    def __init__(self, world_size, folder, device="cpu"):
        self.world_size, self.folder, self.device = world_size, folder, device
        self.processes = []
        self.starts = 0

    def start(self):
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(IMPORTS)
        self.results = context.Queue()
        self.tasks = [context.Queue() for _ in range(self.world_size)]
        self.starts += 1
        store = self.folder / f"store{self.starts}"
        self.processes = [
            context.Process(
                target=_serve,
                args=(rank, self.world_size, self.device, store, tasks, self.results),
                daemon=True,
            )
            for rank, tasks in enumerate(self.tasks)
        ]
        for process in self.processes:
            process.start()
        try:
            for _ in self.processes:
                self.results.get(timeout=START_SECONDS_MAX)
        except queue.Empty:
            self.stop()
            raise AssertionError("the ranks have not started") from None

    def run(self, function, *arguments):
        """What `function` returns on each rank; raises what it raised on any."""
        if not self.processes:
            self.start()
        for tasks in self.tasks:
            tasks.put((function, arguments))
        returned = {}
        failures = []
        for _ in self.processes:
            try:
                rank, failure, value = self.results.get(timeout=RANK_SECONDS_MAX)
            except queue.Empty:
                self.stop()
                raise AssertionError(
                    f"a rank hangs or has died; others said: {failures or 'nothing'}"
                ) from None
            returned[rank] = value
            if failure:
                failures.append(f"rank {rank}: {failure}")
        assert not failures, "\n".join(failures)
        return [returned[rank] for rank in range(len(self.processes))]

    def stop(self):
        for tasks in self.tasks if self.processes else []:
            tasks.put(None)
        for process in self.processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()
        self.processes = []


class Net(torch.nn.Module):
    """Uneven shards (5 rows, 3 rows) and an empty one (1 row) on the second rank."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(6, 5)
        self.second = torch.nn.Linear(5, 3)
        self.last = torch.nn.Linear(3, 1)

    def forward(self, x):
        return self.last(torch.tanh(self.second(torch.tanh(self.first(x)))))
