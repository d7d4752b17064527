"""Published configurations with CPU offload: the path that each takes, and what it trains to.

`deepspeed_corpus.json`: facts of each, where it is from, and how many public repositories of an
index have a file at that path ("uses").
"""

import deepspeed_run
import pytest
import torch
from deepspeed_corpus_programs import CORPUS
from deepspeed_release import HAS_ENGINE

PROGRAM_TIMEOUT = 240
pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * PROGRAM_TIMEOUT + 30)]
RUN = [entry for entry in CORPUS if "not run" not in entry]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """By origin: with Stepwell, and on DeepSpeed alone."""
    folder = tmp_path_factory.mktemp("corpus")
    ours, theirs = (
        deepspeed_run.run(
            "corpus", folder / str(registered), timeout=PROGRAM_TIMEOUT, registered=registered
        )
        for registered in (True, False)
    )
    return {origin: (ours[origin], theirs[origin]) for origin in theirs}


def test_the_corpus_is_of_distinct_configurations():
    assert len(CORPUS) >= 30
    facts = [(entry["config"], entry.get("client")) for entry in CORPUS]
    assert all(fact not in facts[:index] for index, fact in enumerate(facts))
    assert len({entry["origin"] for entry in CORPUS}) == len(CORPUS)


def test_most_of_the_corpus_is_on_the_engine():
    """The bar; which they are is tested below."""
    on = [entry for entry in CORPUS if "off the engine" not in entry]
    assert len(on) / len(CORPUS) >= 0.85
    uses = sum(entry["uses"] for entry in CORPUS)
    assert sum(entry["uses"] for entry in on) / uses >= 0.95


@pytest.mark.parametrize("entry", RUN, ids=lambda entry: entry["origin"])
def test_a_published_configuration_trains_as_with_deepspeed_alone(runs, entry):
    ours, theirs = runs[entry["origin"]]
    assert "error" not in theirs, theirs
    assert "error" not in ours, ours
    if HAS_ENGINE:
        reason = entry.get("off the engine")
        assert ours["reasons"] == (() if reason is None else (reason,))
        assert ours["on engine"] == (reason is None)
    else:
        assert not ours["on engine"]
    assert not theirs["on engine"]
    assert ours["skipped"] == theirs["skipped"]
    torch.testing.assert_close(ours["losses"], theirs["losses"], rtol=1e-6, atol=0)
    torch.testing.assert_close(ours["masters"], theirs["masters"], rtol=1e-5, atol=1e-8)
