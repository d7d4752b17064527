"""Methods of ZeRO's optimizers on stand-ins, in a process that may import DeepSpeed."""

import deepspeed_run
import pytest

PROGRAM_TIMEOUT = 120
pytestmark = pytest.mark.timeout(PROGRAM_TIMEOUT + 30)


def test_each_method_by_itself(tmp_path):
    deepspeed_run.run("stages", tmp_path, timeout=PROGRAM_TIMEOUT)
