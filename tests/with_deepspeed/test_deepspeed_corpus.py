"""Published configurations with CPU offload: the path that each takes, and what it trains to.

`deepspeed_corpus.json`: facts of each, where it is from, and how many public repositories of an
index have a file at that path ("uses").
"""

from pathlib import Path

import deepspeed_run
import pytest
import torch
from deepspeed_corpus_programs import CORPUS, STEPS

PROGRAM_TIMEOUT = 240
pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * PROGRAM_TIMEOUT + 30)]
RUN = [entry for entry in CORPUS if "not run alone" not in entry]
NOT_RUN_ALONE = [entry for entry in CORPUS if "not run alone" in entry]
PAGE = Path(__file__).resolve().parents[2] / "docs" / "deepspeed.md"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """By origin: with Stepwell, and on DeepSpeed alone; None: it cannot run there."""
    folder = tmp_path_factory.mktemp("corpus")
    ours, theirs = (
        deepspeed_run.run(
            "corpus",
            folder / str(registered),
            timeout=PROGRAM_TIMEOUT,
            registered=registered,
            folder=str(folder),
        )
        for registered in (True, False)
    )
    return {origin: (ours[origin], theirs.get(origin)) for origin in ours}


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


@pytest.mark.skipif(not PAGE.is_file(), reason="the page is not beside the tests")
def test_the_page_has_the_numbers():
    text = " ".join(PAGE.read_text().split())
    on = sum("off the engine" not in entry for entry in CORPUS)
    assert f"has {len(CORPUS)} published configurations with offload" in text
    assert f". {on} of them run on the engine" in text


@pytest.mark.parametrize("entry", RUN, ids=lambda entry: entry["origin"])
def test_a_published_configuration_trains_as_with_deepspeed_alone(runs, entry):
    ours, theirs = runs[entry["origin"]]
    assert "error" not in theirs, theirs
    assert "error" not in ours, ours
    reason = entry.get("off the engine")
    assert ours["reasons"] == (() if reason is None else (reason,))
    assert ours["on engine"] == (reason is None)
    assert not theirs["on engine"]
    assert ours["skipped"] == theirs["skipped"]
    assert ours["applied"] == theirs["applied"] == STEPS
    torch.testing.assert_close(ours["losses"], theirs["losses"], rtol=1e-6, atol=0)
    torch.testing.assert_close(ours["masters"], theirs["masters"], rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("entry", NOT_RUN_ALONE, ids=lambda entry: entry["origin"])
def test_what_deepspeed_alone_cannot_run_here_takes_its_path(runs, entry):
    ours, _ = runs[entry["origin"]]
    assert "error" not in ours, ours
    reason = entry.get("off the engine")
    assert ours["reasons"] == (() if reason is None else (reason,))
    assert ours["on engine"] == (reason is None)
    assert ours["applied"] == STEPS
    assert len(set(ours["losses"])) == len(ours["losses"])
