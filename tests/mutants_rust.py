"""Mutants of the Rust core that no Rust test kills: `python tests/mutants_rust.py --help`.

A mutant is the library with one small change: another operator, a function that returns a constant,
a guard that always holds. Which ones there are, cargo-mutants says (`cargo mutants --list`). It
would compile the library once for each, which takes longer than the tests. Here all mutants of a
function are compiled into it, as arms of a match over a number that each process reads from its
environment. So the library is compiled once, in a copy of the tree, and a mutant costs the tests up
to the first failure.

A mutant that the compiler refuses is unviable. Not seen: changes of constants, of `const fn`, and
of functions that return `impl Trait`, whose arms would have types of their own. These are listed;
`cargo mutants` itself takes them.
"""

import argparse
import collections
import concurrent.futures
import fnmatch
import json
import os
import signal
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FILES = ["rust/host/executor.rs", "rust/offload/*.rs", "rust/tier/*.rs", "rust/stream/view.rs"]
# The library's own tests, then those that concern these files, the quickest first.
TESTS = ["downloads", "generations", "jobs", "allocations", "budget", "offload", "deferred"]
TESTS += ["selected", "shared_threads", "slots"]
CARGO = ["--locked", "--profile", "checked", "--features", "baseline-only", "--lib"]
CARGO += [argument for test in TESTS for argument in ("--test", test)]
# Of one test binary: more than its tests take together, each of which waits no longer than 20 s for
# what does not come.
SECONDS_MAX = 300
# Segments of two chunks: tests of several are ten times quicker. The text has the same length, so
# that what follows keeps its place.
SMALLER = ("const CHUNKS: usize = 64;", "const CHUNKS: usize = 02;")
NUMBER = "STEPWELL_MUTANT"
SWITCH = f"""
pub(crate) fn mutant() -> usize {{
    static NUMBER: std::sync::LazyLock<usize> = std::sync::LazyLock::new(|| {{
        std::env::var("{NUMBER}").ok().and_then(|text| text.parse().ok()).unwrap_or(0)
    }});
    *NUMBER
}}
"""


@dataclass
class Mutant:
    number: int
    name: str
    replacement: str
    genre: str
    # Line and column of the change and of its function, from 1.
    begin: tuple[int, int]
    end: tuple[int, int]
    function: tuple[tuple[int, int], tuple[int, int]] | None

    @classmethod
    def of(cls, number, found):
        def corners(span):
            return tuple((span[at]["line"], span[at]["column"]) for at in ("start", "end"))

        function = found["function"] and corners(found["function"]["span"])
        return cls(
            number,
            found["name"],
            found["replacement"],
            found["genre"],
            *corners(found["span"]),
            function,
        )


@dataclass
class Source:
    """A file with the mutants that are to be in it."""

    path: str
    text: str
    mutants: list[Mutant]
    # Where each arm begins and ends in what `mutated` made.
    arms: list[tuple[int, int, Mutant]] = field(default_factory=list)

    def at(self, place):
        """The offset of a line and a column."""
        line, column = place
        begin = 0
        for _ in range(line - 1):
            begin = self.text.index("\n", begin) + 1
        return begin + column - 1

    def body(self, function):
        """Where the body of a function is, without its braces."""
        begin, end = self.at(function[0]), self.at(function[1])
        depth = 0
        for offset in range(begin, end):
            depth += {"(": 1, "[": 1, ")": -1, "]": -1}.get(self.text[offset], 0)
            if self.text[offset] == "{" and depth == 0:
                return begin, offset + 1, end - 1
        raise ValueError(f"no body in `{self.text[begin:end]}`")

    def is_seen(self, mutant):
        if mutant.function is None:
            return False
        begin, body, _ = self.body(mutant.function)
        signature = self.text[begin:body]
        return "const fn" not in signature and "-> impl" not in signature

    def mutated(self):
        """The file with all its mutants."""
        of_function = collections.defaultdict(list)
        for mutant in self.mutants:
            of_function[mutant.function].append(mutant)
        text, end = "", 0
        self.arms = []
        for function in sorted(of_function):
            _, first, last = self.body(function)
            body = self.text[first:last]
            text += self.text[end:first] + " match crate::mutant() {"
            for mutant in of_function[function]:
                change = slice(self.at(mutant.begin) - first, self.at(mutant.end) - first)
                text += f" {mutant.number} => {{"
                begin = len(text)
                text += body[: change.start] + mutant.replacement + body[change.stop :]
                self.arms.append((begin, len(text), mutant))
                text += "}"
            text += f" _ => {{{body}}} }}"
            end = last
        return text + self.text[end:]


def listed(files):
    """The mutants of these files, in their order, numbered from 1."""
    command = ["cargo", "mutants", "--list", "--json", "--exclude", "rust/offload/model.rs"]
    command += [argument for each in files for argument in ("--file", each)]
    found = json.loads(subprocess.run(command, cwd=ROOT, check=True, stdout=-1, text=True).stdout)
    of_file = collections.defaultdict(list)
    for number, each in enumerate(found, 1):
        of_file[each["file"]].append(Mutant.of(number, each))

    def place(path):
        return [fnmatch.fnmatch(path, each) for each in [*files, "*"]].index(True)

    paths = sorted(of_file, key=place)
    return [Source(path, (ROOT / path).read_text(), of_file[path]) for path in paths]


def copied(tree):
    """Copies what git tracks, where it has changed; what has moved is gone from where it was."""
    command = ["git", "ls-files", "Cargo.*", "rust", "tests/*.rs", "benches/*.rs"]
    paths = subprocess.run(command, cwd=ROOT, check=True, stdout=-1, text=True).stdout.split()
    for folder in ("rust", "tests", "benches"):
        for path in (tree / folder).rglob("*.rs"):
            if str(path.relative_to(tree)) not in paths:
                path.unlink()
    for path in paths:
        (tree / path).parent.mkdir(parents=True, exist_ok=True)
        write(tree / path, (ROOT / path).read_text())


def write(path, text):
    """Without a new time where nothing is new: what is compiled stays."""
    text = text.replace(*SMALLER)
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


def cargo(tree, *arguments):
    """What the compiler says."""
    command = ["cargo", *arguments, "--message-format", "json"]
    process = subprocess.run(command, check=False, cwd=tree, stdout=-1, text=True)
    return process.returncode, [json.loads(line) for line in process.stdout.splitlines()]


def refused(messages, sources):
    """The mutants that the compiler refuses."""
    found = set()
    for message in messages:
        message = message.get("message") or {}
        if message.get("level") == "error":
            for span in message["spans"]:
                for source in sources:
                    if span["is_primary"] and source.path == span["file_name"]:
                        offset = span["byte_start"]
                        found |= {one.number for at, to, one in source.arms if at <= offset <= to}
    return found


def compiled(tree, sources):
    """Compiles all that can be; the test binaries, and what cannot."""
    unviable = []
    write(tree / "rust/lib.rs", (ROOT / "rust/lib.rs").read_text() + SWITCH)
    while True:
        for source in sources:
            write(tree / source.path, source.mutated())
        code, messages = cargo(tree, "test", "--no-run", *CARGO)
        if code == 0:
            break
        numbers = refused(messages, sources)
        if not numbers:
            errors = [
                message["message"]["rendered"] for message in messages if "message" in message
            ]
            raise RuntimeError("\n".join(errors))
        for source in sources:
            unviable += [one for one in source.mutants if one.number in numbers]
            source.mutants = [one for one in source.mutants if one.number not in numbers]
    built = {
        message["target"]["name"]: message["executable"]
        for message in messages
        if message.get("executable")
    }
    return [built[name] for name in ["stepwell", *TESTS]], unviable


def outcome(tests, number, tree, kills=None):
    """What becomes of a mutant, and which test binary found it. Those come first that have found
    most so far, as `kills` counts.
    """
    kills = collections.Counter() if kills is None else kills
    environment = {**os.environ, NUMBER: str(number), "RUSTC_BOOTSTRAP": "1"}
    environment |= {"PROPTEST_CASES": "4", "RUST_BACKTRACE": "0"}
    for test in sorted(tests, key=lambda test: -kills[test]):
        command = [test, "-Zunstable-options", "--fail-fast"]
        process = subprocess.Popen(
            command, cwd=tree, env=environment, stdout=-3, stderr=-3, start_new_session=True
        )
        try:
            if process.wait(SECONDS_MAX) != 0:
                kills[test] += 1
                return "killed", Path(test).name
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return "timeout", Path(test).name
    return "survived", ""


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--file", nargs="*", default=FILES, help="only of these files (globs), in this order"
    )
    parser.add_argument("--only", type=int, nargs="*", help="only mutants of these numbers")
    parser.add_argument("--shard", default="0/1", help="K/N: of each N mutants the one number K")
    parser.add_argument("--jobs", type=int, default=2, help="mutants at once")
    parser.add_argument("--tree", type=Path, default=ROOT / "target" / "mutants-rust")
    arguments = parser.parse_args()
    shard, shards = map(int, arguments.shard.split("/"))
    sources = listed(arguments.file)
    unseen = []
    for source in sources:
        unseen += [one for one in source.mutants if not source.is_seen(one)]
        source.mutants = [one for one in source.mutants if source.is_seen(one)]
    copied(arguments.tree)
    tests, unviable = compiled(arguments.tree, sources)
    if outcome(tests, 0, arguments.tree)[0] != "survived":
        raise RuntimeError("the tests fail without a mutant")
    counts = collections.Counter(unviable=len(unviable), unseen=len(unseen))
    for mutant in unseen:
        print(f"unseen   {mutant.number:4} {mutant.name}", flush=True)
    chosen = [
        (source.path, one)
        for source in sources
        for one in source.mutants
        if one.number % shards == shard and (not arguments.only or one.number in arguments.only)
    ]
    with concurrent.futures.ThreadPoolExecutor(arguments.jobs) as executor:
        kills = {source.path: collections.Counter() for source in sources}
        run = {
            executor.submit(outcome, tests, one.number, arguments.tree, kills[path]): one
            for path, one in chosen
        }
        for future in concurrent.futures.as_completed(run):
            result, where = future.result()
            counts[result] += 1
            print(f"{result:8} {run[future].number:4} {run[future].name} {where}", flush=True)
    print(dict(counts))


if __name__ == "__main__":
    main()
