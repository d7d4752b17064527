"""Threads belong to the process: optimizers share them, and none waits for what another does."""

import pathlib
import threading

import pytest
import stepwell
import torch
from stepwell import _core
from stepwell.access.finalizers import finalize, postponed

NUM_OPTIMIZERS = 122


def core_threads():
    """Names of the core's threads in this process that are no drive's."""
    names = [path.read_text().strip() for path in pathlib.Path("/proc/self/task").glob("*/comm")]
    return [name for name in names if name.startswith("stepwell-") and "-io" not in name]


def test_many_optimizers_share_the_threads_of_the_process():
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(64)) for _ in range(NUM_OPTIMIZERS)]
    theirs = [torch.nn.Parameter(param.detach().clone()) for param in params]
    optimizers = [
        stepwell.OffloadAdamW([param], lr=1e-2, threads=(None, 1)[index % 2])
        for index, param in enumerate(params)
    ]
    for param, twin in zip(params, theirs, strict=True):
        param.grad = torch.randn_like(param)
        twin.grad = param.grad.clone()
    for optimizer in optimizers:
        optimizer.step()
    for optimizer in optimizers:
        optimizer.synchronize()
    torch.optim.AdamW(theirs, lr=1e-2).step()
    for param, twin in zip(params, theirs, strict=True):
        torch.testing.assert_close(param, twin)
    # Workers, twice where jobs have waited; two lanes, those that move jobs and hand copies over.
    assert len(core_threads()) <= 2 * _core.Pool.default().threads + 16, core_threads()


def test_threads_say_how_many_workers_of_the_process_there_are():
    workers = _core.Pool.default().threads
    engines = {
        threads: _core.OffloadEngine("cpu", [4], threads=threads)
        for threads in (None, 1, workers, workers + 1)
    }
    found = {threads: engine.threads for threads, engine in engines.items()}
    assert found == {None: max(1, workers - 1), 1: 1, workers: workers, workers + 1: workers}
    with pytest.raises(ValueError, match="invalid number of threads `0`"):
        _core.OffloadEngine("cpu", [4], threads=0)


def train_in_a_ring(optimizer_class, **options):
    """Two models, each with its optimizer, of which each reads what the other one makes."""
    torch.manual_seed(0)
    nets = [torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()) for _ in range(2)]
    optimizers = [optimizer_class(net.parameters(), lr=1e-2, **options) for net in nets]
    inputs = torch.linspace(-1, 1, 32).reshape(4, 8)
    for _ in range(8):
        loss = nets[0](nets[1](inputs)).square().mean() + nets[1](nets[0](inputs)).sum()
        loss.backward()
        for optimizer, other in zip(optimizers, reversed(nets), strict=True):
            optimizer.step()
            # Waits for the other one's last step, behind which this one's may be.
            other(inputs).sum().item()
        for optimizer in optimizers:
            optimizer.zero_grad()
    return [param.detach().clone() for net in nets for param in net.parameters()]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("threads", [None, 1])
def test_optimizers_whose_forwards_wait_for_each_other_end(threads):
    ours = train_in_a_ring(stepwell.OffloadAdamW, threads=threads)
    torch.testing.assert_close(ours, train_in_a_ring(torch.optim.AdamW))


class Owner:
    """Something that goes."""


def owners_of(called, count):
    owners = [Owner() for _ in range(count)]
    for index, owner in enumerate(owners):
        finalize(owner, called.append, index)
    return owners


def test_a_thread_that_a_step_waits_for_calls_finalizers_when_it_says_so():
    called = []
    owners = owners_of(called, 6)
    with postponed() as call_finalizers:
        del owners[0]
        del owners[0]
        assert not called
        call_finalizers()
        assert called == [0, 1]
        del owners[0]
        # Another thread does not wait.
        thread = threading.Thread(target=owners.pop)
        thread.start()
        thread.join()
        assert called == [0, 1, 5]
    assert called == [0, 1, 5, 2]
    del owners[0]
    assert called == [0, 1, 5, 2, 3]
