"""What a plan says of host memory is what the library takes."""

import json

import fork_server
import pytest
import torch
from stepwell import _state
from stepwell._sizes import run_bytes, state_bytes
from stepwell.planning import described
from stepwell.planning.model import model_of
from stepwell.planning.plans import plan_of
from stepwell.planning.workload import Workload
from stepwell.store.twins import Twins

SHAPES = [(3,), (1, 7), (129, 65), (70_000,), (300, 1024), (1,), (65_536,)]
DTYPES = ("bfloat16", "float32", "float16")
MACHINE = described(gpu_memory="80GB", host_memory="256GB")


@pytest.mark.parametrize("moments", _state.MOMENTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_state_and_twins_are_as_large_as_is_said(dtype, moments):
    params = [torch.zeros(shape, dtype=getattr(torch, dtype)) for shape in SHAPES]
    numels = [param.numel() for param in params]
    held = sum(_state.nbytes_of(_state.new(param, moments)) for param in params)
    assert state_bytes(numels, dtype, moments) == held
    assert 2 * run_bytes(numels, params[0].itemsize) == Twins().nbytes(params)


GROWTH = """
import ctypes, gc, json, sys
import torch
from stepwell import OffloadAdamW
from stepwell.cli._workload import host_bytes

def held():
    gc.collect()
    # The C library keeps what operations on the CPU have freed; those on a device have none of it.
    ctypes.CDLL(None).malloc_trim(0)
    return host_bytes()

options, dtype = json.loads(sys.argv[1]), getattr(torch, sys.argv[2])
model = torch.nn.Sequential(*[torch.nn.Linear(2048, 2048, dtype=dtype) for _ in range(16)])
batch = torch.ones(8, 2048, dtype=dtype)
# There before and after are gradients, and what libraries and a process's first optimizer take.
small = torch.nn.Linear(8, 8, dtype=dtype)
small(torch.ones(8, dtype=dtype)).sum().backward()
first = OffloadAdamW(small, lr=1e-4)
first.step()
first.synchronize()
model(batch).sum().backward()
if "weights" in options:
    model.zero_grad()
before = held()
optimizer = OffloadAdamW(model, lr=1e-4, **options)
if "weights" not in options:
    # A pass would have weights on the device, which is the host here.
    optimizer.step()
    optimizer.synchronize()
print(held() - before)
"""


@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        ({}, "bfloat16"),
        ({}, "float32"),
        ({"moments": "bf16"}, "bfloat16"),
        ({"moments": "q8"}, "bfloat16"),
        ({"weights": "host"}, "bfloat16"),
        ({"weights": "host", "moments": "q8"}, "float32"),
    ],
    ids=str,
)
def test_a_process_grows_by_the_host_bytes_of_its_plan(options, dtype):
    ended = fork_server.python("-c", GROWTH, json.dumps(options), dtype, timeout=120)
    assert ended.returncode == 0, ended.stderr
    grown = int(ended.stdout)
    moments = options.get("moments", "fp32")
    model = model_of(lambda: torch.nn.ModuleList(torch.nn.Linear(2048, 2048) for _ in range(16)))
    expected = state_bytes(model.numels, dtype, moments)
    twin = run_bytes(model.numels, getattr(torch, dtype).itemsize)
    # Weights that lie in host memory were there before.
    expected += twin if "weights" in options else 2 * twin
    assert grown == pytest.approx(expected, rel=0.02)
    workload = Workload(dtype=dtype)
    if moments != "bf16":
        kind = "streamed" if "weights" in options else "exact"
        found = next(
            each
            for each in plan_of(model, workload, MACHINE).placements
            if (each.kind, each.moments) == (kind, moments)
        )
        planned = found.host_total - found.host["runtime"]
        assert planned == expected + (twin if "weights" in options else 0)
