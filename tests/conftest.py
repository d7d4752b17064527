"""What every test runs under: fixed seeds, hypothesis profiles, markers that skip."""

import gc
import os
import shutil
import sys
import tempfile
from pathlib import Path

import hypothesis
import pytest
from fork_server import PATIENCE

# Threads of OpenMP spin for a while behind each operation of torch. Tests run side by side, in more
# processes than there are cores: they took two and a half times as much of the processor.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# The default repeats the same examples, so that a run is the same run. `thorough` takes more of
# them, `random` others in every run, `deep` both: `--hypothesis-profile=deep`, or
# STEPWELL_HYPOTHESIS=deep where another command starts pytest.
hypothesis.settings.register_profile(
    "default", max_examples=40, deadline=None, derandomize=True, print_blob=True
)
hypothesis.settings.register_profile(
    "thorough", parent=hypothesis.settings.get_profile("default"), max_examples=1000
)
hypothesis.settings.register_profile(
    "random", parent=hypothesis.settings.get_profile("default"), derandomize=False
)
hypothesis.settings.register_profile(
    "deep", parent=hypothesis.settings.get_profile("thorough"), derandomize=False
)
hypothesis.settings.load_profile(os.environ.get("STEPWELL_HYPOTHESIS", "default"))

# Programs that tests run find what tests share, as tests do.
_FOLDER = str(Path(__file__).parent)
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [_FOLDER, os.environ.get("PYTHONPATH")]))

# What other runs on this host claim is no business of this one.
_CLAIMS = tempfile.TemporaryDirectory(prefix="stepwell-claims-")
os.environ["STEPWELL_CLAIMS_FOLDER"] = _CLAIMS.name


def _has_gpu():
    import torch

    return torch.cuda.is_available()


# marker -> (whether its tests can run here, why not)
REQUIREMENTS = {
    "compiler": (lambda: shutil.which("c++") is not None, "needs a C++ compiler (`c++` in PATH)"),
    "gpu": (_has_gpu, "needs an accelerator that torch can use"),
    "root": (lambda: os.geteuid() == 0, "needs root"),
}


def pytest_runtest_setup(item):
    for marker, (is_met, reason) in REQUIREMENTS.items():
        if item.get_closest_marker(marker) and not is_met():
            pytest.skip(reason)


# Files are dealt out in their order. One that takes long has the other process wait at the end.
LONG_FILES = {"test_optim_programs.py", "test_package.py", "test_store_machine.py"}


def pytest_collection_modifyitems(config, items):
    items.sort(key=lambda item: item.path.name not in LONG_FILES)
    if PATIENCE != 1:
        for item in items:
            marker = item.get_closest_marker("timeout")
            seconds = marker.args[0] if marker else float(config.getini("timeout"))
            item.add_marker(pytest.mark.timeout(seconds * PATIENCE), append=False)


@pytest.fixture(autouse=True, scope="module")
def few_objects():
    """What was imported is left out where garbage is collected: it would take most of the time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def seeded():
    """Each test draws the same numbers, alone or after others."""
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.fixture
def every_gradient_is_a_batch(monkeypatch):
    """Each gradient is copied in the backward, once the next one is there, however small it is."""
    from stepwell.store import gradients

    monkeypatch.setattr(gradients, "BATCH_BYTES", 0)


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """Two ranks, processes that run what tests hand to them."""
    from optim_ranks import Ranks

    ranks = Ranks(2, tmp_path_factory.mktemp("two"))
    yield ranks
    ranks.stop()


def pytest_unconfigure():
    # Extensions look for leaks when Python ends.
    gc.unfreeze()
