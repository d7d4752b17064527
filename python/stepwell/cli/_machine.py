"""What `stepwell doctor` says of the machine: instructions, cores, ranks, memory, storage."""

from __future__ import annotations

import os
import re
from itertools import groupby
from typing import TYPE_CHECKING, Any

from stepwell import _core
from stepwell.cli._finding import Finding

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["build", "cores", "instructions", "memory", "numa", "ranks", "storage", "without_hint"]

_HUGE_PAGES = "/sys/kernel/mm/transparent_hugepage/enabled"
_NO_STEP = "nothing steps on Stepwell: each step raises this error"


def instructions(system: dict[str, Any]) -> Iterator[Finding]:
    """Which kernels run."""
    available = ", ".join(system["isas_available"])
    if system["isa"] is None:
        yield Finding(
            topic="instructions",
            status="broken",
            found=without_hint(system["isa_error"]),
            meaning=_NO_STEP,
            fix=f"unset STEPWELL_ISA, or set it to one of {available}",
        )
        return
    found = f"{system['isa']}; this CPU runs {available}"
    if system["isa"] == system["isas_available"][-1] != "scalar":
        yield Finding(
            topic="instructions", status="ok", found=found, meaning="the widest kernels run"
        )
    elif os.environ.get("STEPWELL_ISA"):
        yield Finding(
            topic="instructions",
            status="warning",
            found=f"{found}; STEPWELL_ISA asks for this one",
            meaning="the results are the same, but steps are slower than this CPU can do them",
            fix="unset STEPWELL_ISA",
        )
    else:
        yield Finding(
            topic="instructions",
            status="warning",
            found=found,
            meaning="the results are the same, but steps are many times slower",
            fix="use a CPU with AVX2 and FMA, or an aarch64 one",
        )


def build(facts: dict[str, Any]) -> Iterator[Finding]:
    """Whether the core is built for speed."""
    if facts.get("profile") == "debug":
        yield Finding(
            topic="build",
            status="warning",
            found="debug",
            meaning="the core was built without optimisation: steps are many times slower",
            fix="pip install stepwell, or `maturin develop --release` in its sources",
        )


def cores(system: dict[str, Any]) -> Iterator[Finding]:
    """How many threads step, and on how many cores."""
    workers = system["pool_cpus"]
    if workers is None:
        yield Finding(
            topic="threads",
            status="broken",
            found=without_hint(system["pool_error"]),
            meaning=_NO_STEP,
            fix=_fix_of_pool(system["pool_error"]),
        )
        return
    core_of: dict[int, int] = {cpu["id"]: cpu["core"] for cpu in system["cpus"]}
    if not core_of:
        yield Finding(
            topic="threads",
            status="warning",
            found=f"{_count(len(workers), 'thread')}; /sys does not say which CPUs share a core",
            meaning="two threads may share a core, and efficiency cores are used like others",
            fix="mount /sys in this container; read-only is enough",
        )
        return
    cpus, used = set(workers), {core_of.get(cpu, cpu) for cpu in workers}
    found = f"{_count(len(workers), 'thread')} on {_count(len(used), 'core')}"
    if len(workers) > len(used):
        waits = (
            "threads wait for one another's CPU: a step is slower than with a thread per core"
            if len(workers) > len(cpus)
            else "threads share cores: a step is not faster than with a thread per core"
        )
        asked = _asked_for(system)
        yield Finding(
            topic="threads",
            status="warning",
            found=f"{found}{f'; {asked}' if asked else ''}",
            meaning=waits,
            fix=f"unset STEPWELL_THREADS, or set it to {len(used)} at most",
        )
        return
    kinds: dict[int, str] = {cpu["core"]: cpu["kind"] for cpu in system["cpus"]}
    num_performance = sum(kind == "performance" for kind in kinds.values())
    if len(workers) >= num_performance:
        num_efficiency = len(kinds) - num_performance
        rest = f"; {_count(num_efficiency, 'efficiency core')} unused" if num_efficiency else ""
        yield Finding(
            topic="threads",
            status="ok",
            found=found + (rest if len(workers) == num_performance else ""),
            meaning="one thread per physical core",
        )
        return
    asked = _asked_for(system)
    yield Finding(
        topic="threads",
        status="note" if asked else "warning",
        found=f"{found}, of {len(kinds)}",
        meaning=f"cores are left idle: {asked or 'this process may use no more of them'}",
        fix=_fix_of_few_threads(asked),
    )


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def without_hint(error: str) -> str:
    """A message of the core in one line, up to its hint: a finding has a field for that."""
    return " ".join(re.split(r"[;.\s]*\bhint:", error, maxsplit=1)[0].split())


def _asked_for(system: dict[str, Any]) -> str | None:
    """Which setting chose the number of threads; None where the machine did."""
    if os.environ.get("STEPWELL_THREADS"):
        return f"STEPWELL_THREADS is {os.environ['STEPWELL_THREADS']}"
    if system["ranks_on_host"] > 1:
        return f"{system['ranks_on_host']} ranks share this host"
    return None


def _fix_of_few_threads(asked: str | None) -> str | None:
    if asked is None:
        return "widen the affinity mask of this process (taskset, numactl, the container's cpuset)"
    return "unset STEPWELL_THREADS to use all cores" if "STEPWELL_THREADS" in asked else None


def _fix_of_pool(error: str) -> str:
    for variable in ("STEPWELL_THREADS", "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "LOCAL_RANK"):
        if variable in error or (variable == "STEPWELL_THREADS" and "number of threads" in error):
            return f"unset {variable}, or set it to a whole number that fits this machine"
    return "look at the affinity mask of this process (taskset) and at its limits (ulimit -u)"


def numa(system: dict[str, Any]) -> Iterator[Finding]:
    """How near memory is."""
    nodes = system["numa_nodes"]
    if len(nodes) == 1:
        found, meaning = "1 node", "all memory is equally near"
    else:
        found = f"{len(nodes)} nodes: {'; '.join(_node(system, node) for node in nodes)}"
        meaning = "memory is nearer to the cores of its node: one rank per node steps fastest"
    yield Finding(topic="NUMA", status="ok", found=found, meaning=meaning)


def _node(system: dict[str, Any], node: int) -> str:
    cores = {cpu["core"] for cpu in system["cpus"] if cpu["node"] == node}
    gpus = [gpu for gpu, of_node in system["gpus"] if of_node == node]
    beside = f" and {_count(len(gpus), 'GPU')} ({', '.join(gpus)})" if gpus else ""
    return f"node {node} has {_count(len(cores), 'core')}{beside}"


def ranks(system: dict[str, Any]) -> Iterator[Finding]:
    """What each of several ranks would get, and who is on these cores already."""
    if processes := system["others_on_cpus"]:
        numbers = ", ".join(map(str, processes))
        yield Finding(
            topic="ranks",
            status="warning",
            found=f"other processes ({numbers}) step on the same cores",
            meaning="steps of one wait for those of the other",
            fix="for ranks of one job torchrun, or LOCAL_RANK and LOCAL_WORLD_SIZE for each; for "
            "several jobs `taskset -c`, which gives each cores of its own",
        )
    num_ranks = max(system["ranks_on_host"], len(system["gpus"]), len(system["numa_nodes"]), 2)
    places = _core.places_of_ranks(num_ranks)
    node_of = {cpu["id"]: cpu["node"] for cpu in system["cpus"]}
    yield Finding(
        topic="ranks",
        status="ok",
        found=f"of {num_ranks} ranks on this host\n"
        + "\n".join(
            f"rank {rank} gets {_cores(cpus, node_of)}{f', beside GPU {gpu}' if gpu else ''}"
            for rank, (cpus, gpu) in enumerate(places)
        ),
        meaning="if a launcher says how many there are, as torchrun does; else each takes all cores"
        if any(gpu for _, gpu in places)
        else "if a launcher says how many there are, as torchrun does; else each takes all cores. "
        "Which GPU is whose is not known, so that cores go by their number",
    )


def _cores(cpus: list[int], node_of: dict[int, int]) -> str:
    """Such as `3 cores of node 0 (CPUs 0-2)`."""
    by_node = [(node, list(each)) for node, each in groupby(cpus, lambda cpu: node_of.get(cpu, 0))]
    return " and ".join(
        f"{_count(len(each), 'core')} of node {node} (CPUs {_ranges(each)})"
        for node, each in by_node
    )


def _ranges(cpus: Iterable[int]) -> str:
    """Such as `0-2,7`."""
    runs = groupby(enumerate(sorted(cpus)), lambda each: each[1] - each[0])
    edges = [[cpu for _, cpu in run] for _, run in runs]
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in edges)


def memory(system: dict[str, Any]) -> Iterator[Finding]:
    """What state can take, and on which pages it lies."""
    policy = system["huge_page_policy"]
    if policy is None or "[never]" in policy:
        yield Finding(
            topic="huge pages",
            status="warning",
            found=policy or f"{_HUGE_PAGES} cannot be read",
            meaning="state lies in small pages: steps are slower, and the first one much",
            fix=f"echo madvise | sudo tee {_HUGE_PAGES}",
        )
    else:
        yield Finding(
            topic="huge pages",
            status="ok",
            found=policy,
            meaning="state lies in huge pages where memory is not fragmented",
        )
    free, claimed = system["free_memory_bytes"], system["claimed_memory_bytes"]
    others = f"; other processes have claimed {claimed / 2**30:,.1f} GiB of it and not taken it yet"
    yield Finding(
        topic="free memory",
        status="ok" if free is not None else "note",
        found="unknown" if free is None else f"{free / 2**30:,.1f} GiB{others if claimed else ''}",
        meaning="state that takes more is refused"
        if free is not None
        else "state that takes more than there is ends in the kernel killing the process",
    )
    limit = system["memlock_limit_bytes"]
    yield Finding(
        topic="locked memory",
        status="ok" if limit is None else "note",
        found="unlimited" if limit is None else f"{limit / 2**20:,.0f} MiB",
        meaning="buffers can be kept resident"
        if limit is None
        else "parameters of DeepSpeed's on NVMe have buffers to lock; no optimizer has",
        fix=None if limit is None else "ulimit -l unlimited; for a container --ulimit memlock=-1",
    )


def storage(system: dict[str, Any]) -> Iterator[Finding]:
    """Asynchronous storage I/O."""
    available = system["io_uring"] == "available"
    yield Finding(
        topic="io_uring",
        status="ok" if available else "note",
        found=str(system["io_uring"]),
        meaning="asynchronous storage I/O is there"
        if available
        else "no asynchronous storage I/O; state in memory does not need it",
        fix=None
        if available
        else "sysctl kernel.io_uring_disabled=0; in a container, a seccomp profile that allows it",
    )
