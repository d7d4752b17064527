"""The guard of DTensors under way, by itself: what waits, and what is out of its sight.

What FSDP2 does with them is in `test_offload_ranks.py`.
"""

import gc
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from insides import begin
from stepwell.access import guard
from stepwell.access.guard import Forwards
from stepwell.access.shard_guard import ShardGuard
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn import Parameter


@pytest.fixture(scope="module")
def mesh(tmp_path_factory):
    store = tmp_path_factory.mktemp("store") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


class Uploads(guard.Uploads):
    """Notes what is waited for."""

    def __init__(self):
        self.waits, self.num_finished = [], 0

    def wait(self, params):
        self.waits.append(list(params))
        return True

    def finish(self):
        self.num_finished += 1


class Case:
    """A plain parameter and two shards, and a guard of them."""

    def __init__(self, mesh, modules=lambda shards: ()):
        self.plain = Parameter(torch.ones(3))
        # Without a collective, whose thread would hold their memory for a while.
        self.shards = [
            Parameter(distribute_tensor(torch.ones(4, 3), mesh, [Shard(0)], src_data_rank=None))
            for _ in range(2)
        ]
        self.params = [self.plain, *self.shards]
        self.uploads = Uploads()
        self.guard = ShardGuard(self.params, self.uploads, Forwards(), modules(self.shards))

    def protect(self, params):
        begin(self.guard.protection(params))

    def under_way(self):
        found = [type(each).__name__ in ("UnderWay", "WrittenShard") for each in self.params]
        assert self.guard.any_under_way == any(found)
        return found

    def exposed(self):
        found = self.guard.exposed(self.params, self.params)
        return [any(each is param for each in found) for param in self.params]


def same(found, expected):
    """Whether lists have the same tensors, which may be under way."""
    return (
        len(found) == len(expected)
        and all(map(id, found))
        and list(map(id, found)) == list(map(id, expected))
    )


def test_uses_of_shards_wait_for_them_once(mesh):
    case = Case(mesh)
    first, second = case.shards
    assert case.under_way() == [False, False, False]
    case.protect([case.plain])
    assert case.under_way() == [True, False, False]
    case.guard.clear(case.guard.num_steps)
    case.protect([first])
    assert case.under_way() == [False, True, False]
    first.to_local()
    assert same(case.uploads.waits.pop(), [first])
    assert case.under_way() == [False, False, False]
    case.protect(case.params)
    assert case.under_way() == [True, True, True]
    first.to_local()
    assert same(case.uploads.waits.pop(), [first])
    assert case.under_way() == [True, False, True]
    first.to_local()
    assert not case.uploads.waits
    case.guard.enter([second])
    assert same(case.uploads.waits.pop(), [second])
    assert case.under_way() == [True, False, False]
    assert type(first) is type(second) is DTensor
    case.guard.clear(case.guard.num_steps)


def test_all_that_is_waited_for_is_plain_again(mesh):
    case = Case(mesh)
    case.protect(case.params)
    case.guard.wait_for(case.params[:2])
    assert same([each for waited in case.uploads.waits for each in waited], case.params[:2])
    assert case.under_way() == [False, False, True]
    # Of a step before.
    case.guard.clear(case.guard.num_steps - 1)
    assert case.under_way() == [False, False, True]
    case.guard.clear(case.guard.num_steps)
    assert case.under_way() == [False, False, False]
    assert all(type(shard) is DTensor for shard in case.shards)


@pytest.mark.parametrize("fails", [False, True])
def test_shards_are_plain_when_their_optimizer_is_gone(mesh, fails):
    case = Case(mesh)
    shards, uploads = case.shards, case.uploads
    finish = uploads.finish

    def finish_or_fail():
        finish()
        if fails:
            raise OSError("failed")

    uploads.finish = finish_or_fail
    case.protect(shards)
    del case
    gc.collect()
    assert uploads.num_finished == 1
    assert all(type(shard) is DTensor for shard in shards)


def test_nothing_is_waited_for_when_an_optimizer_is_gone_that_has_landed(mesh):
    case = Case(mesh)
    uploads = case.uploads
    case.protect(case.shards)
    case.guard.clear(case.guard.num_steps)
    del case
    gc.collect()
    assert not uploads.num_finished


def test_a_traced_use_is_noted(mesh, monkeypatch):
    case = Case(mesh)
    for is_compiling in (False, True, False):
        monkeypatch.setattr(guard, "is_compiling", lambda is_compiling=is_compiling: is_compiling)
        case.protect(case.shards)
        before = case.guard.was_compiled
        case.shards[0].to_local()
        assert case.guard.was_compiled == (before or is_compiling)
    case.guard.clear(case.guard.num_steps)


def test_other_references_to_memory_expose_it(mesh):
    case = Case(mesh)
    assert case.exposed() == [False, False, False]
    alias = case.shards[1]._local_tensor.view(-1)
    assert case.exposed() == [False, False, True]
    del alias
    other = case.plain.detach()
    assert case.exposed() == [True, False, False]
    # One that is known does not.
    assert not case.guard.exposed([case.plain], [*case.params, other])


class Own(torch.Tensor):
    pass


class OtherDTensor(DTensor):
    pass


def test_shards_of_other_classes_are_exposed_and_not_guarded(mesh):
    case = Case(mesh)
    first, second = case.shards
    first._local_tensor = first._local_tensor.as_subclass(Own)
    second.__class__ = OtherDTensor
    assert case.exposed() == [False, True, True]
    case.protect(case.shards)
    assert case.under_way() == [False, False, False]


class OfFsdp(SimpleNamespace):
    """What FSDP2 has of a parameter."""

    __hash__ = object.__hash__


class Sharded(torch.nn.Module):
    """A module as FSDP2 makes one."""

    def __init__(self, state):
        super().__init__()
        self.state = state

    def _get_fsdp_state(self):
        return self.state


def state_of(groups, *, is_older):
    """Of a module, as torch has it since 2.12 and before."""
    if is_older:
        return SimpleNamespace(_fsdp_param_group=groups[0] if groups else None)
    return SimpleNamespace(_fsdp_param_groups=groups)


@pytest.mark.parametrize("is_older", [False, True])
def test_the_memory_that_fsdp_reads_is_guarded(mesh, is_older):
    found = []

    def modules(shards):
        # Beside the first one's memory, and elsewhere; and one that was never made.
        data = shards[0]._local_tensor.view(-1), torch.ones(12)
        found.extend(
            OfFsdp(sharded_param=shard, _sharded_param_data=each)
            for shard, each in zip(shards, data, strict=True)
        )
        group = SimpleNamespace(fsdp_params=[*found, OfFsdp()])
        states = [state_of(groups, is_older=is_older) for groups in ([group], [])]
        return [torch.nn.Linear(1, 1), *map(Sharded, states)]

    case = Case(mesh, modules)
    # What FSDP2 offloads may still be on its way; of another version's that is not known.
    found[0].offload_to_cpu = False
    assert [case.guard.is_reduced(param) for param in case.params] == [False, True, False]
    found[0].offload_to_cpu, found[1].offload_to_cpu = True, False
    assert [case.guard.is_reduced(param) for param in case.params] == [False, False, True]
    assert case.exposed() == [False, False, True]
    case.protect(case.shards)
    assert case.under_way() == [False, True, False]
    found[0]._sharded_param_data.sum()
    assert same(case.uploads.waits[0], case.shards[:1])
    assert case.under_way() == [False, False, False]
