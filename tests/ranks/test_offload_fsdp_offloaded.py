"""OffloadAdamW over shards that FSDP2 keeps in host memory (`CPUOffloadPolicy`), on gloo ranks."""

import fsdp_offload_programs as programs
import pytest
import torch
from optim_ranks import Ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


@pytest.fixture(scope="module", params=[1, 2], ids=lambda size: f"{size} ranks")
def ranks(request, tmp_path_factory):
    ranks = Ranks(request.param, tmp_path_factory.mktemp("ranks"))
    yield ranks
    ranks.stop()


@pytest.mark.parametrize(
    "program",
    [
        programs.trains_as_with_shards_elsewhere,
        programs.dtypes_and_codecs,
        programs.steps_go_on_behind,
        programs.own_shards_only,
        programs.readers_wait,
        programs.gradients_wait,
        programs.gradients_that_were_read_are_freed,
        programs.what_is_done_between_steps_counts,
        programs.evaluates,
        programs.state_dicts_go_on_elsewhere,
        programs.gradients_that_are_not_finite,
        programs.what_does_not_go_with_it_is_refused,
        programs.parameters_without_their_model,
        programs.on_devices,
    ],
    ids=lambda program: program.__name__,
)
def test_shards_in_host_memory(ranks, program):
    ranks.run(program)


def test_deferred_and_on_volumes(ranks, tmp_path):
    ranks.run(programs.deferred_and_on_volumes, tmp_path)


@pytest.mark.gpu
def test_gpus(tmp_path):
    ranks = Ranks(min(torch.cuda.device_count(), 2), tmp_path, "cuda")
    try:
        ranks.run(programs.on_devices)
    finally:
        ranks.stop()
