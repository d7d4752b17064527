"""Which DeepSpeed was tested: the digests of its methods, and what the metadata claim."""

import ast
import functools
import importlib.metadata
import importlib.util
import re
import sys
from pathlib import Path

import pytest
import stepwell.deepspeed
import torch
from stepwell.deepspeed import fingerprints

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "versions"))
import fingerprints as maker
import run as versions

INSTALLED = importlib.metadata.version("deepspeed")


def read(module):
    """A module of the installed DeepSpeed, which is not imported."""
    folder = Path(importlib.util.find_spec("deepspeed").origin).parent
    return (folder / f"{module.partition('.')[2].replace('.', '/')}.py").read_text()


STALE = "stale. hint: make fingerprints"


def test_the_digests_are_of_what_stepwells_classes_override_and_call():
    made = maker.tables({INSTALLED: read})
    for name, known in fingerprints.tested().items():
        assert made[name][INSTALLED] == known[INSTALLED], STALE


def test_every_release_has_what_stepwells_classes_override_and_call():
    """As far as the installed release shows it."""
    for (file, name), theirs in maker.CLASSES.items():
        needs = maker.needed(name, maker.own_methods(file, name), maker.with_bases(read, *theirs))
        known = fingerprints.tested()[name]
        # A release that lacks one of them is left out.
        assert set(known) == set(maker.RELEASES)
        for methods in known.values():
            assert needs <= methods[".".join(theirs)].keys(), STALE


def test_checksums_of_files_are_those_of_the_installed_release():
    assert maker.checksums({INSTALLED: read})[INSTALLED] == fingerprints.files()[INSTALLED]


def digest(source):
    return fingerprints.digest(ast.parse(source).body)


PLAIN = "def step(self, closure=None):\n    return f'{self.x}' 'y'\n"


@pytest.mark.parametrize(
    "source",
    [
        "def step(self, closure=None):\n    # Why.\n\n    return f'{self.x}' 'y'\n",
        'def step(\n    self,\n    closure=None,\n):\n    "What."\n    return (f"{self.x}y")\n',
    ],
)
def test_comments_docstrings_and_layout_do_not_count(source):
    assert digest(source) == digest(PLAIN)


@pytest.mark.parametrize(
    "source",
    [
        "def step(self, closure=1):\n    return f'{self.x}' 'y'\n",
        "def step(self, closure=None):\n    return f'{self.x}' 'z'\n",
        "@f\ndef step(self, closure=None):\n    return f'{self.x}' 'y'\n",
        "def step(self, closure=None):\n    self.x()\n    return f'{self.x}' 'y'\n",
    ],
)
def test_everything_else_counts(source):
    assert digest(source) != digest(PLAIN)


def test_a_digest_is_the_same_in_every_python():
    # As made by Python 3.11.
    assert digest(PLAIN) == "30632464af39120c"


class Example:
    @torch.no_grad()
    def step(self):
        """What."""
        return 1

    @property
    def scale(self):
        return 1

    @scale.setter
    def scale(self, value):
        """What."""


def test_a_method_has_the_digest_of_its_source():
    methods, _ = maker.methods_of(Path(__file__).read_text(), "Example")
    for name in ("step", "scale"):
        assert fingerprints.digest_of(vars(Example)[name]) == fingerprints.digest(methods[name])
    assert len(methods["scale"]) == 2

    @functools.wraps(Example.step)
    def patched(self):
        return Example.step(self)

    assert fingerprints.digest_of(patched) != fingerprints.digest(methods["step"])
    assert fingerprints.digest_of(len) is None


def test_metadata_claim_what_is_tested():
    releases = maker.RELEASES
    assert f">={releases[0]},<={releases[-1]}" == stepwell.deepspeed.VERSIONS
    claims = (ROOT / "pyproject.toml").read_text()
    assert claims.count(f'"deepspeed{stepwell.deepspeed.VERSIONS}"') == 2
    assert f'"deepspeed=={releases[-1]}"' in claims
    page = (ROOT / "docs" / "deepspeed.md").read_text()
    assert f"DeepSpeed {releases[0]} to {releases[-1]}" in page
    limits = (ROOT / "docs" / "limits.md").read_text()
    assert f"| DeepSpeed | {releases[0]} to {releases[-1]};" in limits
    (oldest,) = re.findall(r'"torch>=([0-9.]+)"', claims)
    (newest,) = re.findall(r'"torch==([0-9.]+)\.\*"', claims)
    assert f"torch {oldest} and {newest}" in page
    # What is older than the installed release has a cell of its own.
    cells = {f"deepspeed=={release}" for release in releases[:-1]} | {f"torch=={oldest}.*"}
    assert versions.CELLS.keys() == cells
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert f"torch {oldest} or later" in readme
    assert f"DeepSpeed {releases[0]} to {releases[-1]}" in readme


def test_every_cell_names_tests_that_are_there():
    tests = {path.stem.removeprefix("test_") for path in (ROOT / "tests").glob("**/test_*.py")}
    for names in versions.CELLS.values():
        assert names
        assert set(names) <= tests
