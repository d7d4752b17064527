"""What a plan says of host memory is what the library takes."""

import json

import fork_server
import pytest
import torch
from stepwell import _state
from stepwell.planning import described
from stepwell.planning.model import model_of
from stepwell.planning.placements import placements
from stepwell.planning.state_bytes import TWIN_ALIGN_BYTES, run_bytes, state_bytes, step_bytes
from stepwell.planning.streamed import ADDER_BYTES, AHEAD_NUMEL
from stepwell.planning.workload import Workload
from stepwell.store import adder, staying, twins

SHAPES = [(3,), (1, 7), (129, 65), (70_000,), (300, 1024), (1,), (65_536,)]
DTYPES = ("bfloat16", "float32", "float16")
MACHINE = described(gpu_memory="80GB", host_memory="256GB")


@pytest.mark.parametrize("moments", _state.MOMENTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_state_and_twins_take_what_the_library_says(dtype, moments):
    params = [torch.empty(shape, dtype=getattr(torch, dtype), device="meta") for shape in SHAPES]
    numels = [param.numel() for param in params]
    assert state_bytes(numels, dtype, moments) == sum(_state.nbytes(p, moments) for p in params)
    assert 2 * run_bytes(numels, params[0].itemsize) == twins.Twins().nbytes(params)
    # Beside it a step reads the gradient, and the upload the weight.
    beside = 2 * params[0].itemsize
    expected = _state.step_bytes(params[0].dtype, moments) + beside
    assert step_bytes(dtype, moments) == pytest.approx(expected)


def test_sizes_that_are_written_down_twice_are_the_same():
    assert AHEAD_NUMEL == staying._AHEAD_NUMEL
    assert TWIN_ALIGN_BYTES == twins._ALIGN_BYTES
    assert adder.DEVICE_BYTES_MAX == ADDER_BYTES


GROWTH = """
import ctypes, gc, json, sys
import torch
from stepwell import OffloadAdamW
from stepwell.cli._offload_cases import host_bytes

def held():
    gc.collect()
    # The C library keeps what operations on the CPU have freed; those on a device have none of it.
    ctypes.CDLL(None).malloc_trim(0)
    return host_bytes()

options, dtype = json.loads(sys.argv[1]), getattr(torch, sys.argv[2])
model = torch.nn.Sequential(*[torch.nn.Linear(2048, 2048, dtype=dtype) for _ in range(16)])
batch = torch.ones(8, 2048, dtype=dtype)
# Gradients, and what libraries take, are there before and after.
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
            for each in placements(model, workload, MACHINE)
            if (each.kind, each.moments) == (kind, moments)
        )
        planned = found.host_total - found.host["runtime"]
        assert planned == expected + (twin if "weights" in options else 0)
