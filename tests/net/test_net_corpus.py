"""Published configurations, by `stepwell run`: what came of each at 7c4e5c5 (`corpus.json`)."""

import json
from pathlib import Path

import pytest
from net_cases import run_deepspeed

FOLDER = Path(__file__).parent
CORPUS = json.loads((FOLDER.parent / "deepspeed_corpus.json").read_text())
OUTCOMES = json.loads((FOLDER / "corpus.json").read_text())


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    return run_deepspeed("corpus", tmp_path_factory.mktemp("corpus"))


def test_each_of_the_corpus_has_an_outcome():
    assert [entry["origin"] for entry in CORPUS] == list(OUTCOMES)
    assert sum(outcome["on the engine"] for outcome in OUTCOMES.values()) >= 41


@pytest.mark.parametrize("origin", OUTCOMES)
def test_a_published_configuration_trains_as_it_did(published, origin):
    found, expected = published[origin], OUTCOMES[origin]
    assert "error" not in found, found
    for key in ("on the engine", "skipped"):
        assert found[key] == expected[key]
    # 16-bit products differ between machines, and DeepSpeed's own path has a kernel of its own.
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-2)
    assert found["size of masters"] == pytest.approx(expected["size of masters"], rel=1e-3)
