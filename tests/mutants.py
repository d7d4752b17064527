"""Mutants of the Python package that no test kills: `python tests/mutants.py --help`.

A mutant is the package with one small change: a comparison, a constant, an operator, a condition, a
statement that is gone. The tests that execute the changed line run on it until one fails, first
those that execute what few tests do nearby. A mutant that survives is a line that no test looks at,
or an equal program.

This process imports the package and collects the tests, and runs none. For each mutant it is
forked; the child takes the changed function for the one that is there, and runs tests. So a mutant
costs little more than the tests up to the first failure. Which tests execute a line is found by one
child that runs all of them under coverage.py.

Not seen: what runs when a module is imported, and tests that work in processes of their own. Tests
of several ranks run on one, as far as they pass there; with `--ranks 2` on a second one too, which
is forked for each. (FSDP2 does not pass there: torch keeps what it finds out of a mesh.) For ZeRO
there are `zero_in_process*.py` and `zero_*_stand_ins.py`.
"""

import argparse
import ast
import contextlib
import copy
import gc
import importlib
import itertools
import json
import math
import multiprocessing
import os
import random
import signal
import sys
import time
import traceback
import types
import warnings
from collections import Counter
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import optim_ranks
import pytest
import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "python" / "stepwell"

# What decides, and the tests that are about it.
SUITES = {
    "optim": (["optim.py", "_[a-z]*.py"], ["test_optim*.py"]),
    "offload": (["offload/[a-z]*.py", "access/[a-z]*.py"], ["test_offload*.py", "test_access.py"]),
    "deepspeed": (
        [
            "deepspeed/case.py",
            "deepspeed/obstacles.py",
            "deepspeed/plan.py",
            "deepspeed/options.py",
            "deepspeed/zero/operands.py",
        ],
        [
            "test_deepspeed_plan.py",
            "test_deepspeed_obstacles.py",
            "test_deepspeed_zenflow_plan.py",
            "test_deepspeed_operands.py",
        ],
    ),
    "zero": (
        ["deepspeed/zero/[a-z]*.py", "deepspeed/state/[a-z]*.py"],
        [
            "zero_in_process*.py",
            "zero_*_stand_ins.py",
            "test_deepspeed_deferred_*.py",
            "test_deepspeed_fetcher.py",
            "test_deepspeed_homes.py",
            "test_deepspeed_mapped.py",
            "test_deepspeed_operands.py",
            "test_deepspeed_optimizer.py",
            "test_deepspeed_order.py",
            "test_deepspeed_partitions*.py",
            "test_deepspeed_parts.py",
            "test_deepspeed_swapped*.py",
            "test_offload_late_copies.py",
        ],
    ),
}
# They take minutes, and pass through every line.
RANDOM_PROGRAMS = "test_optim_programs.py"
COULD_NOT_BE_MADE = 9
RECORD_SECONDS_MAX = 3600
OPTIONS = ["-q", "-s", "-p", "no:cacheprovider", "-p", "no:xdist"]

# ---- what is changed ----

COMPARISONS = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
ARITHMETIC = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}
# None stands for these as well.
NOTHING_RETURNED = ("return", "return None", "return False")
# Types, messages and logs are none of a test's business here.
UNTOUCHED_CALLS = {"log", "info", "warning", "debug", "overload", "TypeVar", "cast"}


def alternatives(node):
    """What may stand for a node: (how it is said, the other node)."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARISONS:
        yield "comparison", changed(node, ops=[COMPARISONS[type(node.ops[0])](), *node.ops[1:]])
    elif isinstance(node, ast.BoolOp):
        other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield "and/or", changed(node, op=other)
        for index in range(len(node.values)):
            left = node.values[:index] + node.values[index + 1 :]
            yield "operand gone", left[0] if len(left) == 1 else changed(node, values=left)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield "not", node.operand
    elif isinstance(node, (ast.BinOp, ast.AugAssign)) and type(node.op) in ARITHMETIC:
        yield "arithmetic", changed(node, op=ARITHMETIC[type(node.op)]())
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield "constant", changed(node, value=not node.value)
    elif isinstance(node, ast.Constant) and type(node.value) in (int, float):
        yield "constant", changed(node, value=node.value + 1)
    elif isinstance(node, ast.Return) and ast.unparse(node) not in NOTHING_RETURNED:
        yield "returned", changed(node, value=none_for(node))
    if may_go(node):
        yield "statement gone", ast.Expr(none_for(node))
    if isinstance(node, (ast.If, ast.While, ast.IfExp)) and not isinstance(
        node.test, (ast.Compare, ast.BoolOp, ast.UnaryOp)
    ):
        yield "condition", changed(node, test=ast.UnaryOp(ast.Not(), node.test))


def may_go(node):
    """Whether a statement may be left out without what follows it missing a name."""
    if isinstance(node, ast.Expr):
        return not isinstance(node.value, (ast.Constant, ast.Yield))
    if isinstance(node, ast.Assign):
        return isinstance(node.targets[0], (ast.Attribute, ast.Subscript))
    return isinstance(node, (ast.Raise, ast.Continue, ast.Break, ast.Delete, ast.AugAssign))


def none_for(node):
    """None; also where a function without `super()` would have other free variables."""
    none = ast.Constant(None)
    if "super()" not in ast.unparse(node):
        return none
    return ast.BoolOp(ast.And(), [ast.Name("__class__", ast.Load()), none])


def changed(node, **fields):
    other = copy.copy(node)
    for name, value in fields.items():
        setattr(other, name, value)
    return other


@dataclass(frozen=True)
class Mutant:
    path: Path
    line: int
    statement_line: int
    kind: str
    before: str
    after: str

    def __str__(self):
        where = f"{self.path.relative_to(PACKAGE)}:{self.line}"
        return f"{where} {self.kind}: `{self.before}` -> `{self.after}`"


class Walk(ast.NodeVisitor):
    """Every place of a module that can be changed: (parent, field, index, line of statement).

    The line is 0 for what runs when the module is imported.
    """

    def __init__(self):
        self.places = []
        self.line = 0

    def visit_FunctionDef(self, node):
        outside = self.line
        for field, value in (("args", [node.args]), ("body", node.body)):
            for index, child in enumerate(value):
                self.line = outside if field == "args" else child.lineno
                self.see(node, field, index if field == "body" else None, child)
        self.line = outside

    def generic_visit(self, node):
        for field, value in ast.iter_fields(node):
            if field in ("annotation", "returns", "type_params", "decorator_list"):
                continue
            for index, child in enumerate(value if isinstance(value, list) else [value]):
                self.see(node, field, index if isinstance(value, list) else None, child)

    def see(self, parent, field, index, child):
        if isinstance(child, ast.AST) and not is_untouched(child):
            outside = self.line
            if self.line and isinstance(child, ast.stmt):
                self.line = child.lineno
            self.places.append((parent, field, index, self.line))
            self.visit(child)
            self.line = outside


def is_untouched(node):
    if isinstance(node, (ast.Import, ast.ImportFrom, ast.JoinedStr)):
        return True
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        return True
    if isinstance(node, ast.Call):
        called = ast.unparse(node.func).rpartition(".")[2]
        return called in UNTOUCHED_CALLS or called.endswith(("Error", "Warning"))
    if isinstance(node, ast.Expr):
        return is_untouched(node.value)
    if isinstance(node, ast.keyword):
        # Of zip: an assertion.
        return node.arg == "strict"
    if isinstance(node, ast.Assign):
        return ast.unparse(node.targets[0]) == "__all__"
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def mutants(path):
    """All mutants of the functions of a file, each with the tree that is changed until the next."""
    tree = ast.parse(path.read_text())
    walk = Walk()
    walk.visit(tree)
    for parent, field, index, line in walk.places:
        place = getattr(parent, field)
        node = place if index is None else place[index]
        for kind, other in alternatives(node) if line else ():
            texts = [ast.unparse(each).splitlines()[0][:90] for each in (node, other)]
            put(parent, field, index, other)
            yield Mutant(path, node.lineno, line, kind, *texts), ast.fix_missing_locations(tree)
            put(parent, field, index, node)


def put(parent, field, index, node):
    if index is None:
        setattr(parent, field, node)
    else:
        getattr(parent, field)[index] = node


# ---- which tests run ----


def record(session, sources, path):
    """Runs all tests, and writes what was seen: seconds, and which tests reach a line.

    A test that fails without a mutant is left out, and named.
    """
    import coverage

    run = coverage.Coverage(data_file=None, include=[str(source) for source in sources])
    run.start()
    seconds = {}
    for item, following in itertools.zip_longest(session.items, session.items[1:]):
        began = time.monotonic()
        run.switch_context(item.nodeid)
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if not session.testsfailed:
            seconds[item.nodeid] = time.monotonic() - began
        session.testsfailed = 0
    run.stop()
    data = run.get_data()
    lines = {str(source): data.contexts_by_lineno(str(source)) for source in sources}
    failed = [item.nodeid for item in session.items if item.nodeid not in seconds]
    recorded = {"seconds": seconds, "lines": lines, "failed": failed, "modules": [*sys.modules]}
    path.write_text(json.dumps(recorded))
    return 0


def succeed(session, items):
    """Whether the tests pass; runs them up to the first that fails."""
    for item, following in zip(items, [*items[1:], None], strict=True):
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if session.testsfailed:
            return False
    return True


def chosen(record, mutant, seconds_max):
    """The tests that may kill a mutant, in the order in which they are tried."""
    lines, seconds = record["lines"][str(mutant.path)], record["seconds"]
    reached = lines.get(str(mutant.line)) or lines.get(str(mutant.statement_line), [])
    # First those that reach what few tests reach nearby: the branches of a condition. Of these the
    # quickest, but each function once before any other of its parameters.
    rarity = dict.fromkeys(reached, math.inf)
    for line in range(mutant.line - 2, mutant.line + 5):
        near = lines.get(str(line), [])
        for test in rarity.keys() & set(near):
            rarity[test] = min(rarity[test], len(near))
    siblings = Counter()
    keys = {}
    for test in sorted(seconds.keys() & set(reached), key=seconds.get):
        function = test.partition("[")[0]
        keys[test] = (rarity[test], siblings[function], seconds[test])
        siblings[function] += 1
    found = sorted(keys, key=keys.get)
    totals = itertools.accumulate(seconds[test] for test in found)
    return [test for test, total in zip(found, totals, strict=True) if total <= seconds_max]


# ---- processes ----


def forked(act, timeout_s, log):
    """What `act` returns in a forked process; None if it took too long.

    It leads a process group, which is killed with it.
    """
    pid = os.fork()
    if pid == 0:
        code = COULD_NOT_BE_MADE
        try:
            os.setsid()
            output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(output, 1)
            os.dup2(output, 2)
            code = act()
        except BaseException:  # noqa: BLE001 - told in the log
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    deadline = time.monotonic() + timeout_s
    found = 0
    try:
        while time.monotonic() < deadline:
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.02)
        return None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        if not found:
            os.waitpid(pid, 0)


def functions(code):
    """The code of every function of a module, by name and first line."""
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            yield (each.co_name, each.co_firstlineno), each
            yield from functions(each)


def living_functions(paths):
    """The functions of these files that are there by now, by file."""
    found = {str(path): [] for path in paths}
    for each in gc.get_objects():
        # By type: an isinstance asks proxies, some of which warn.
        if type(each) is types.FunctionType and each.__code__.co_filename in found:
            found[each.__code__.co_filename].append(each)
    return found


def become(mutant, tree, living):
    """Changes those of the functions `living` of the mutant's file that differ in `tree`."""
    path = str(mutant.path)
    before = dict(functions(compile(mutant.path.read_text(), path, "exec", dont_inherit=True)))
    after = dict(functions(compile(tree, path, "exec", dont_inherit=True)))
    changed = {key: code for key, code in after.items() if code != before[key]}
    found = 0
    for each in living:
        key = (each.__code__.co_name, each.__code__.co_firstlineno)
        if key in changed:
            each.__code__ = changed[key]
            found += 1
    if not found:
        raise LookupError(f"no function was changed, of {list(changed)}")


class ForkedRanks:
    """In place of the ranks of `optim_ranks`: this process, and one forked from it for each other.

    So all of them run the changed function, and coverage.py sees the first.
    """

    most = 1

    def __init__(self, world_size, folder):
        self.world_size, self.folder = min(world_size, self.most), folder
        self.runs = 0

    def run(self, function, *arguments):
        """What `function` returns, on each rank."""
        self.runs += 1
        # The threads of OpenMP are not in a fork.
        torch.set_num_threads(1)
        context = multiprocessing.get_context("fork")
        others = []
        try:
            for rank in range(1, self.world_size):
                here, there = context.Pipe(duplex=False)
                process = context.Process(
                    target=self._tell, args=(rank, there, function, arguments)
                )
                process.start()
                there.close()
                others.append((process, here))
            found = [self._call(0, function, arguments)]
            for _, here in others:
                assert here.poll(optim_ranks.RANK_SECONDS_MAX), "a rank hangs"
                failure, value = here.recv()
                assert not failure, failure
                found.append(value)
            return found
        finally:
            for process, here in others:
                process.kill()
                process.join()
                here.close()

    def _call(self, rank, function, arguments):
        dist.init_process_group(
            "gloo",
            init_method=f"file://{self.folder}/forked{self.runs}",
            rank=rank,
            world_size=self.world_size,
            timeout=timedelta(seconds=optim_ranks.COLLECTIVE_SECONDS_MAX),
        )
        try:
            return function(*arguments)
        finally:
            dist.destroy_process_group()

    def _tell(self, rank, there, function, arguments):
        try:
            there.send((None, self._call(rank, function, arguments)))
        except BaseException:  # noqa: BLE001 - told to the first
            there.send((traceback.format_exc(), None))

    def stop(self):
        pass


class Mutants:
    """A plugin that runs the tests on mutants, instead of the tests."""

    def __init__(self, sources, name, arguments):
        self.sources, self.arguments = sources, arguments
        name = "-".join([name, *arguments.tests])
        if arguments.ranks > 1:
            name += f"-{arguments.ranks}-ranks"
        self.path = arguments.out / f"{name}.json"
        self.log = arguments.out / f"{name}.log"
        self.counts = Counter()
        self.living = {}

    def pytest_runtestloop(self, session):
        if self.arguments.record or not self.path.exists():
            self.path.unlink(missing_ok=True)
            forked(lambda: record(session, self.sources, self.path), RECORD_SECONDS_MAX, self.log)
        if not self.path.exists():
            sys.exit(f"the tests were not recorded: {self.log}")
        recorded = json.loads(self.path.read_text())
        for test in recorded["failed"]:
            print(f"left out, since it fails without a mutant: {test}")
        items = {item.nodeid: item for item in session.items}
        # What torch imports late, it would import in every child.
        for module in recorded["modules"]:
            if module.startswith("torch."):
                # pytest makes warnings errors.
                with warnings.catch_warnings(), contextlib.suppress(ImportError):
                    warnings.simplefilter("ignore")
                    importlib.import_module(module)
        self.living = living_functions(self.sources)
        # A child does not look through what is there, so it does not copy it.
        gc.collect()
        gc.freeze()
        rng = random.Random(self.arguments.seed)
        for source in self.sources:
            for mutant, tree in mutants(source):
                # Drawn for every mutant, so that a sample of one file is that of all.
                if rng.random() < self.arguments.sample and self.is_wanted(mutant):
                    began = time.monotonic()
                    outcome = self.outcome(session, mutant, tree, items, recorded)
                    self.counts[outcome] += 1
                    print(f"{outcome:9} {time.monotonic() - began:5.1f} s  {mutant}", flush=True)
        return True

    def is_wanted(self, mutant):
        lines = self.arguments.line
        return self.arguments.file in str(mutant.path) and (not lines or mutant.line in lines)

    def outcome(self, session, mutant, tree, items, recorded):
        tests = [test for test in chosen(recorded, mutant, self.arguments.seconds) if test in items]
        if not tests:
            return "untested"

        def run():
            become(mutant, tree, self.living[str(mutant.path)])
            return 0 if succeed(session, [items[test] for test in tests]) else 1

        timeout_s = 60 + 5 * sum(recorded["seconds"][test] for test in tests)
        code = forked(run, timeout_s, self.log)
        names = {None: "timeout", 0: "survived", COULD_NOT_BE_MADE: "not made"}
        return names.get(code, "killed")


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("suite", choices=list(SUITES))
    parser.add_argument("--sample", type=float, default=1.0, help="share of the mutants, 0 to 1")
    parser.add_argument("--seed", type=int, default=0, help="which mutants the sample takes")
    parser.add_argument("--file", default="", help="only of files whose path has this in it")
    parser.add_argument("--line", type=int, nargs="*", help="only of these lines")
    parser.add_argument(
        "--seconds", type=float, default=math.inf, help="of tests for a mutant, of those that reach"
    )
    parser.add_argument(
        "--tests", nargs="*", default=[], help="only of files whose name has one of these in it"
    )
    parser.add_argument("--ranks", type=int, default=1, help="the most in tests of several")
    parser.add_argument("--record", action="store_true", help="run all tests anew")
    parser.add_argument("--out", type=Path, default=ROOT / "target" / "mutants-python")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    os.chdir(ROOT)
    modules, patterns = SUITES[arguments.suite]
    sources = [path for each in modules for path in sorted(PACKAGE.glob(each))]
    for source in sources:
        importlib.import_module(".".join(source.relative_to(PACKAGE.parent).with_suffix("").parts))
    tests = [path for each in patterns for path in sorted((ROOT / "tests").glob(each))]
    wanted = arguments.tests or [""]
    tests = [
        str(path)
        for path in tests
        if path.name != RANDOM_PROGRAMS and any(each in path.name for each in wanted)
    ]
    ForkedRanks.most = arguments.ranks
    optim_ranks.Ranks = ForkedRanks
    plugin = Mutants(sources, arguments.suite, arguments)
    pytest.main([*OPTIONS, *tests], plugins=[plugin])
    print(dict(plugin.counts))


if __name__ == "__main__":
    main()
