"""Every Python access to a parameter whose new weight is under way gets the new weight.

Weights land when they are waited for, and not before: an access that does not wait sees old ones
for certain, and a write that does not wait is overwritten for certain.
"""

import copy
import ctypes
import io
import pickle
import threading
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
from offload_landing import SIZE, Landing, Later, flat, old_and_new, parameters_under_way
from stepwell.access.guard import WeightGuard
from torch.nn import Parameter

# Of what torch calls old: scripts are a DeprecationWarning in some of its versions.
WARNINGS = ("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning")


@pytest.fixture(params=[True, False], ids=["submitted", "being submitted"])
def under_way(request):
    yield from parameters_under_way(request.param)


def saved(param):
    buffer = io.BytesIO()
    torch.save({"weight": param}, buffer)
    buffer.seek(0)
    return torch.load(buffer)["weight"]


def sent(param):
    """To another process and back."""
    return pickle.loads(ForkingPickler.dumps(param))


def linear():
    net = torch.nn.Linear(SIZE, SIZE, bias=False)

    def call(param):
        net.weight = param
        return net(torch.ones(1, SIZE))

    return call


def custom(param):
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

    return Twice.apply(param)


def through_a_thread(param):
    found = []
    thread = threading.Thread(target=lambda: found.append(param.detach().clone()))
    thread.start()
    thread.join(timeout=60)
    return found[0]


def with_dual(param):
    return torch.func.jvp(torch.sin, (param.detach(),), (torch.ones_like(param),))


def _make_script():
    @torch.jit.script
    def twice(x: torch.Tensor):
        return 2 * x

    return twice


def _make_writing_script():
    @torch.jit.script
    def fill(x: torch.Tensor):
        x.fill_(3)

    return fill


def without_torch_function(read):
    def act(param):
        with torch._C.DisableTorchFunctionSubclass():
            return read(param)

    return act


def _data_of(param):
    other = torch.zeros(SIZE, SIZE)
    other.data = param
    return other


def _functionalized(param):
    return torch.func.functionalize(lambda w: w.detach().add(1).mul_(2))(param)


READS = {
    "norm": lambda p: p.norm(),
    "arithmetic": lambda p: 2 * p + 1,
    "data": lambda p: p.data,
    "detach": lambda p: p.detach(),
    "clone": lambda p: p.clone(),
    "cpu": lambda p: p.cpu(),
    "to": lambda p: p.to(torch.float64),
    "numpy": lambda p: torch.from_numpy(p.detach().numpy()),
    "numpy, no_grad": lambda p: torch.from_numpy(p.requires_grad_(False).numpy()),
    "tolist": lambda p: torch.tensor(p.tolist()),
    "item": lambda p: torch.tensor(p[0, 0].item()),
    "index": lambda p: p[1:, 2],
    "iteration": lambda p: torch.stack(list(p)),
    "view": lambda p: p.view(-1),
    "storage": lambda p: torch.tensor(p.untyped_storage().tolist()),
    "data_ptr": lambda p: torch.tensor(_memory(p.data_ptr())),
    "dlpack": lambda p: torch.from_dlpack(p.detach()),
    "repr": lambda p: _text(repr(p)),
    "str of a list": lambda p: _text(str([p])),
    "comparison": lambda p: p > 0,
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": lambda p: pickle.loads(pickle.dumps(p)),
    "torch.save": saved,
    "class": lambda p: pickle.loads(pickle.dumps(type(p)))(p.data),
    "torch.multiprocessing": sent,
    "foreach": lambda p: torch.stack(torch._foreach_mul([p], 3)),
    "foreach norm": lambda p: torch.stack(torch._foreach_norm([p, p])),
    "stack": lambda p: torch.stack([torch.zeros(SIZE, SIZE), p]),
    "keyword": lambda p: torch.mul(input=torch.ones(SIZE, SIZE), other=p),
    "lerp into an average": lambda p: torch.ones(SIZE, SIZE).lerp_(p.detach(), 0.1),
    "vector": lambda p: torch.nn.utils.parameters_to_vector([p]),
    "linear": linear(),
    "functional": lambda p: torch.nn.functional.linear(torch.ones(1, SIZE), p),
    "aten": lambda p: torch.ops.aten.sum(p),
    "aten overload": lambda p: torch.ops.aten.sum.default(p),
    "as_subclass": lambda p: p.as_subclass(torch.Tensor).clone(),
    "autograd function": custom,
    "jvp": with_dual,
    "hessian": lambda p: torch.func.hessian(lambda w: w.pow(3).sum())(p),
    "jacobian": lambda p: torch.autograd.functional.jacobian(torch.sin, p),
    "another thread": through_a_thread,
    "Parameter(data)": lambda p: Parameter(p.data),
    "Buffer": lambda p: torch.nn.Buffer(p),
    "out of place fill": lambda p: torch.zeros(SIZE, SIZE).copy_(p.detach()),
    "copied from": lambda p: torch.zeros(SIZE, SIZE).copy_(p),
    "grad of another": lambda p: _grad_of_another(p),
    # Code in C++ that does not ask for __torch_function__.
    "torch.tensor": lambda p: torch.tensor(p),
    "torch.tensor of a list": lambda p: torch.tensor([p[0, 0], 1.0]),
    "torch.asarray": lambda p: torch.asarray(p).clone(),
    "torch.as_tensor": lambda p: torch.as_tensor(p, dtype=torch.float64),
    "torch.Tensor": lambda p: torch.Tensor(p.requires_grad_(False)).clone(),
    "new_tensor": lambda p: torch.zeros(1).new_tensor(p),
    "data of another": _data_of,
    "nested": lambda p: torch.nested.nested_tensor([p]).unbind()[0],
    "_make_subclass": lambda p: torch.Tensor._make_subclass(torch.Tensor, p).clone(),
    "script": lambda p: _make_script()(p),
    "trace": lambda p: torch.jit.trace(Later(p), torch.ones(1, SIZE), check_trace=False).weight,
    "to_dlpack": lambda p: torch.from_dlpack(torch._C._to_dlpack(p.requires_grad_(False))).clone(),
    "func.grad": lambda p: torch.func.grad(lambda w: w.pow(3).sum())(p),
    "func.vmap": lambda p: torch.func.vmap(lambda w: 2 * w)(p),
    "func.vmap over another": lambda p: torch.func.vmap(lambda x: x @ p)(torch.ones(2, SIZE)),
    "func.vjp": lambda p: torch.func.vjp(torch.sin, p)[0],
    "func.functionalize": _functionalized,
    "no torch function": without_torch_function(lambda p: torch.sin(p)),
    "no torch function, method": without_torch_function(lambda p: p.clone()),
    "no torch function, operator": without_torch_function(lambda p: 2 * p + 1),
    "no torch function, data": without_torch_function(lambda p: p.data.clone()),
    "no torch function, norm": without_torch_function(lambda p: p.norm()),
}


def _memory(pointer):
    return list((ctypes.c_float * (SIZE * SIZE)).from_address(pointer))


def _text(text):
    return torch.tensor(bytearray(text.encode()))


def _grad_of_another(param):
    other = Parameter(torch.zeros(SIZE, SIZE))
    other.grad = param
    return other.grad


# torch advises against some of them.
@pytest.mark.filterwarnings(*WARNINGS)
@pytest.mark.parametrize("read", READS.values(), ids=READS.keys())
def test_reads_get_the_new_weight(under_way, read):
    (param, _), _, _, (landed, _) = under_way
    expected, found = flat(read(landed)), flat(read(param))
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
        # Not `is`: on another stream than the step's, what is returned may still be under way.
        assert type(one) == type(other)
        assert one.requires_grad == other.requires_grad
        assert one.is_leaf == other.is_leaf


@torch.no_grad()
def _no_grad(write, param):
    write(param)


def _hold_data(param):
    param.data = torch.full_like(param, 5)


def _sgd(param):
    optimizer = torch.optim.SGD([param], lr=0.5)
    param.grad = torch.ones(SIZE, SIZE)
    optimizer.step()
    param.grad = None


def _adamw(param, **options):
    optimizer = torch.optim.AdamW([param], lr=0.5, **options)
    param.grad = torch.ones(SIZE, SIZE)
    optimizer.step()
    param.grad = None


WRITES = {
    "zero_": lambda p: p.zero_(),
    "init": lambda p: torch.nn.init.constant_(p, 3),
    "data.copy_": lambda p: p.data.copy_(torch.ones(SIZE, SIZE)),
    "data =": _hold_data,
    "clamp_": lambda p: p.clamp_(-0.1, 0.1),
    "index": lambda p: p.__setitem__(0, 7),
    "numpy": lambda p: p.detach().numpy().fill(4),
    "foreach": lambda p: torch._foreach_mul_([p], 2),
    "out=": lambda p: torch.add(torch.ones(SIZE, SIZE), 1, out=p.detach()),
    "merge": lambda p: p.add_(torch.ones(SIZE, 1) @ torch.ones(1, SIZE)),
    "vector": lambda p: torch.nn.utils.vector_to_parameters(torch.ones(SIZE * SIZE), [p]),
    "SGD": _sgd,
    "AdamW": _adamw,
    "AdamW, one by one": lambda p: _adamw(p, foreach=False),
    "fused AdamW": lambda p: _adamw(p, fused=True),
    "data of another": lambda p: _data_of(p).fill_(2),
    "asarray": lambda p: torch.asarray(p, requires_grad=False).fill_(2),
    "_make_subclass": lambda p: torch.Tensor._make_subclass(torch.Tensor, p).fill_(2),
    "script": lambda p: _make_writing_script()(p),
    "no torch function, function": without_torch_function(lambda p: torch.mul(p, 2, out=p)),
    "no torch function, method": without_torch_function(lambda p: p.fill_(2)),
    "no torch function, operator": without_torch_function(lambda p: p.__setitem__(0, 7)),
}


@pytest.mark.filterwarnings(*WARNINGS)
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES.keys())
def test_writes_go_on_top_of_the_new_weight(under_way, write):
    (param, _), guard, _, (landed, _) = under_way
    _no_grad(write, landed)
    _no_grad(write, param)
    guard.finish()
    assert torch.equal(param, landed)


@pytest.mark.filterwarnings(*WARNINGS)
def test_a_module_that_holds_a_parameter_under_way_is_traced():
    (param, _), (new, _) = old_and_new()
    uploads = Landing()
    uploads.send([param], [new])
    guard = WeightGuard(uploads)
    guard.protect([param])
    layer = torch.nn.Linear(SIZE, SIZE, bias=False)
    layer.weight = param
    x = torch.ones(1, SIZE)
    assert torch.equal(torch.jit.trace(layer, x)(x), torch.nn.functional.linear(x, new))
