"""A change of the number of ranks on load: DeepSpeed's own results, on the engine."""

import deepspeed_run
import deepspeed_world_programs
import pytest
from test_deepspeed_offload import assert_same_partitions

PROGRAM_TIMEOUT = 240
pytestmark = pytest.mark.timeout(2 * PROGRAM_TIMEOUT + 30)


@pytest.fixture(scope="module", params=[(2, 1), (1, 2)], ids=["2 to 1", "1 to 2"])
def worlds(request, tmp_path_factory):
    """What each rank that loads has found, of the ranks that saved and those that load."""
    folder = tmp_path_factory.mktemp("world")
    saving, loading = request.param
    for program, ranks in (("world_saves", saving), ("world_loads", loading)):
        found = deepspeed_run.run(
            program,
            folder / program,
            timeout=PROGRAM_TIMEOUT,
            ranks=ranks,
            folder=str(folder / "saved"),
        )
    return found if loading > 1 else [found]


ELASTIC = "ZeRO-2, elastic"


@pytest.mark.parametrize(
    "name", [name for name in deepspeed_world_programs.CASES if name != ELASTIC]
)
def test_as_deepspeeds_own(worlds, name):
    for found in worlds:
        ours, theirs = found[name, True], found[name, False]
        assert ours[0].startswith("Offload")
        assert theirs[0].startswith("DeepSpeed")
        assert_same_partitions(ours[1], theirs[1])
        assert ours[2] == theirs[2]
        assert_same_partitions(ours[3], theirs[3])


def test_elastic_checkpoints_are_refused_as_by_deepspeed(worlds):
    # It has none for another number of ranks any more, whatever the JSON says.
    for found in worlds:
        assert found[ELASTIC, True] == found[ELASTIC, False]
        assert found[ELASTIC, True][0] == "ZeRORuntimeException"
