"""Checkpoints of ZeRO-3 with its state on a volume need no memory for a copy of the state."""

import deepspeed_run
import pytest
from deepspeed_nvme_export_programs import COPY_BYTES, LAYERS, LEFT_BYTES

PROGRAM_TIMEOUT = 100
pytestmark = pytest.mark.timeout(PROGRAM_TIMEOUT + 20)


@pytest.fixture(scope="module")
def export(tmp_path_factory):
    """What the program has found. A save for which there is too little memory fails there."""
    folder = tmp_path_factory.mktemp("nvme_export")
    return deepspeed_run.run("nvme_export", folder, timeout=PROGRAM_TIMEOUT, folder=str(folder))


def test_a_checkpoint_is_saved_where_no_copy_of_the_state_fits(export):
    assert export["tier"] == "volume"
    # Masters and moments, each once.
    assert 3 * COPY_BYTES < export["file_bytes"] < 3 * COPY_BYTES + (1 << 20)


def test_deepspeeds_script_maps_what_was_saved(export):
    assert export["taken"] < LEFT_BYTES
    assert export["same"] == [True] * LAYERS
