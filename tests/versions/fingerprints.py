"""Makes `python/stepwell/deepspeed/fingerprints.json`: `make fingerprints`.

Downloads the sources of the tested releases of DeepSpeed by name, once, and imports nothing of
them. Which methods count follows from the sources of Stepwell's classes and DeepSpeed's.
"""

from __future__ import annotations

import ast
import functools
import json
import subprocess
import sys
import tarfile
from pathlib import Path

from stepwell.deepspeed.fingerprints import checksum, digest

RELEASES = ("0.19.6", "0.19.7", "0.19.8")
"""The releases of DeepSpeed that tests run on."""

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "python/stepwell/deepspeed/fingerprints.json"
DOWNLOADS = ROOT / "target/deepspeed"

ENGINE = "deepspeed.runtime.engine", "DeepSpeedEngine"
BASES = "deepspeed.runtime.base_optimizer", "ZeROOptimizer"
CLASSES = {
    ("stage_1_2", "OffloadZeroOptimizer"): (
        "deepspeed.runtime.zero.stage_1_and_2",
        "DeepSpeedZeroOptimizer",
    ),
    ("stage_3", "OffloadZeroOptimizerStage3"): (
        "deepspeed.runtime.zero.stage3",
        "DeepSpeedZeroOptimizer_Stage3",
    ),
    ("fetching", "ModuleHooks"): (
        "deepspeed.runtime.zero.parameter_offload",
        "DeepSpeedZeRoOffload",
    ),
    ("fetching", "Coordinator"): (
        "deepspeed.runtime.zero.partitioned_param_coordinator",
        "PartitionedParameterCoordinator",
    ),
}
"""Stepwell's classes, and DeepSpeed's in whose place they are."""

BESIDE = {
    "OffloadZeroOptimizer": [("offloaded", "Offloaded"), ("deferred", "DeferredZeroOptimizer")],
    "OffloadZeroOptimizerStage3": [("offloaded", "Offloaded")],
}
"""What counts with a class of these: what it takes methods from, and its subclass."""

GUARDED = {
    "OffloadZeroOptimizer": {
        "_get_compact_grad_partition_slice",
        "_use_compact_grad_partition_buffer",
    }
}
"""Methods that a class of these calls only with the releases that have them."""

# What puts ours in the place of DeepSpeed's.
MAKER = "_configure_zero_optimizer"


def methods_of(source, name):
    """The methods that a class defines, and the names of its bases."""
    (cls,) = (
        node
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef) and node.name == name
    )
    methods = {}
    for node in cls.body:
        if isinstance(node, ast.FunctionDef):
            is_private = node.name.startswith("__") and not node.name.endswith("__")
            key = f"_{name.lstrip('_')}{node.name}" if is_private else node.name
            methods.setdefault(key, []).append(node)
    return methods, [base.id for base in cls.bases if isinstance(base, ast.Name)]


def own_methods(file, name):
    """The methods that a class of Stepwell's defines, with those of what is beside it."""
    path = ROOT / f"python/stepwell/deepspeed/zero/{file}.py"
    methods = methods_of(path.read_text(), name)[0]
    for beside in BESIDE.get(name, ()):
        for method, functions in own_methods(*beside).items():
            methods[method] = methods.get(method, []) + functions
    return methods


def with_bases(read, module, name):
    """The methods of a class of DeepSpeed, with those of its bases."""
    methods, bases = methods_of(read(module), name)
    if BASES[1] in bases:
        for base in (BASES[1], "BackwardHookStateManager", "DeepSpeedOptimizer"):
            methods = methods_of(read(BASES[0]), base)[0] | methods
    return methods


def accessed(functions, *objects):
    """The names of the attributes of `objects` in functions."""
    return {
        node.attr
        for function in functions
        for node in ast.walk(function)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in objects
    }


def required(ours, theirs):
    """The methods of DeepSpeed's class that ours overrides, and those that it calls."""
    called = {
        name
        for functions in ours.values()
        for name in accessed(functions, "self", "super()") & theirs.keys()
    }
    return ours.keys() & theirs.keys(), called


def needed(name, ours, theirs):
    """The methods that every release has to have, as one release shows it."""
    return set().union(*required(ours, theirs)) - GUARDED.get(name, set())


def digests(ours, theirs, engine):
    """The methods that count, as they are in a release: of DeepSpeed's class, and of its engine."""
    overridden, called = required(ours, theirs)
    callers = {
        name for name, functions in theirs.items() if accessed(functions, "self") & overridden
    }
    drivers = {
        name
        for name, functions in engine.items()
        if accessed(functions, "self.optimizer") & ours.keys()
    }
    return (
        {name: digest(theirs[name]) for name in sorted(overridden | called | callers)},
        {name: digest(engine[name]) for name in sorted(drivers | {MAKER})},
    )


def tables(readers):
    """The tables.

    A release that lacks a method that another has, and that ours overrides or calls, is left out:
    other than those that ours calls only where they are.

    Args:
        readers: by release, what reads a module of it by its dotted path.
    """
    engines = {
        release: methods_of(read(ENGINE[0]), ENGINE[1])[0] for release, read in readers.items()
    }
    found = {}
    for (file, name), theirs in CLASSES.items():
        ours = own_methods(file, name)
        known = {release: with_bases(read, *theirs) for release, read in readers.items()}
        needs = set().union(*(needed(name, ours, methods) for methods in known.values()))
        found[name] = {
            release: dict(
                zip(
                    (".".join(theirs), ".".join(ENGINE)),
                    digests(ours, methods, engines[release]),
                    strict=True,
                )
            )
            for release, methods in known.items()
            if needs <= methods.keys()
        }
    return found


def sources(release):
    """How a module of a release is read; downloads it, if that was not done before."""
    archive = DOWNLOADS / f"deepspeed-{release}.tar.gz"
    if not archive.exists():
        # Without its dependencies, and without building it.
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary=:all:"]
        command += ["--no-build-isolation", "--disable-pip-version-check", "-d", str(DOWNLOADS)]
        subprocess.run([*command, f"deepspeed=={release}"], check=True, timeout=600)

    @functools.cache
    def read(module):
        with tarfile.open(archive) as files:
            member = f"deepspeed-{release}/{module.replace('.', '/')}.py"
            return files.extractfile(member).read().decode()

    return read


def checksums(readers):
    """Of the files of the methods that count, by release.

    Args:
        readers: as `tables` has it.
    """
    modules = sorted({ENGINE[0], BASES[0], *(module for module, _ in CLASSES.values())})
    return {
        release: {module: checksum(read(module).encode()) for module in modules}
        for release, read in readers.items()
    }


if __name__ == "__main__":
    readers = {release: sources(release) for release in RELEASES}
    made = {"files": checksums(readers), "methods": tables(readers)}
    TABLE.write_text(json.dumps(made, indent=1) + "\n")
