"""Between a step and the next forward: what waits for weights, and for which of them.

Weights are large and stepped in the reverse order of the forward by one worker, so that what does
not wait reads what was there before, by a margin of milliseconds. While its weight is under way the
class of a parameter is a subclass of `torch.nn.Parameter`.
"""

import copy
import gc
import io
import pickle
import threading
import weakref

import pytest
import stepwell
import torch
from offload_cases import WIDTH, Net, batch, reversed_params, train_step
from torch import nn

# So many elements take a worker a millisecond.
BALLAST = 1 << 20


class Tied(Net):
    """The first weight is that of the last layer as well, whose module is called in no forward."""

    def __init__(self):
        super().__init__(BALLAST)
        self.again = nn.Linear(WIDTH, WIDTH)
        self.again.weight = self.first.weight

    def forward(self, x):
        return super().forward(x).sum() + nn.functional.linear(x, self.again.weight).sum()


class Attention(nn.Module):
    """`out_proj` is a module whose weight is used without calling it."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.net = Net(BALLAST)

    def forward(self, x):
        return self.net(self.attention(x[None], x[None], x[None], need_weights=False)[0][0])


class ShortCut(nn.Module):
    """Calls its layers in training; in evaluation it computes with their weights itself."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Net(1 << 16), nn.Linear(4, 4)])

    def forward(self, x):
        if self.training:
            return self.layers[1](self.layers[0](x))
        self.seen = under_way(self)
        return x


def under_way(net):
    """The names of the parameters whose new weights nobody has waited for."""
    return {name for name, param in net.named_parameters() if type(param) is not nn.Parameter}


def trained(net, steps=3, **options):
    """A model behind a step of which all weights are under way."""
    torch.manual_seed(0)
    optimizer = stepwell.OffloadAdamW(net, **{"lr": 1e-2, "threads": 1, **options})
    for step in range(steps):
        train_step(net, optimizer, step)
    return net, optimizer


def run(make, read, steps=4, *, gives_model=True):
    """Losses, what `read` finds behind each step, and the weights in the end."""
    torch.manual_seed(0)
    net = make()
    model = net if gives_model else None
    optimizer = stepwell.OffloadAdamW(reversed_params(net), model=model, lr=1e-2, threads=1)
    seen = []
    for step in range(steps):
        seen.append(train_step(net, optimizer, step))
        assert bool(under_way(net)) == gives_model
        seen += read(net, optimizer)
    return seen + synchronize(net, optimizer)


def second_call(net, optimizer):
    with torch.no_grad():
        return [net(batch(7, width=WIDTH)).sum().item()]


def synchronize(net, optimizer):
    optimizer.synchronize()
    return [param.double().norm().item() for param in net.parameters()]


@pytest.mark.parametrize("model", [Tied, Attention])
def test_models_compute_what_they_do_where_steps_wait(model):
    assert run(model, second_call) == run(model, second_call, gives_model=False)


# ---- which weights are waited for ----


def test_forwards_wait_for_their_own_weights_only():
    net, _ = trained(Net(BALLAST))
    assert under_way(net) == {"first.weight", "first.bias", "last.weight", "last.bias"}
    net.first(batch(0, width=WIDTH))
    assert under_way(net) == {"last.weight", "last.bias"}
    net.last(batch(0, width=WIDTH))
    assert not under_way(net)


def test_within_a_forward_a_use_waits_for_its_own_weight():
    net, _ = trained(Net(1 << 16))
    found = []

    def use(module, args):
        net.last.bias.sum()
        found.append(under_way(net))

    net.first.register_forward_pre_hook(use)
    net.first(batch(0, width=WIDTH))
    assert found == [{"last.weight"}]
    net.last.weight.sum()
    assert not under_way(net)


@pytest.mark.parametrize("fails", [False, True])
def test_outside_of_forwards_the_first_use_waits_for_all(fails):
    net, _ = trained(Net(1 << 16))
    if fails:
        with pytest.raises(RuntimeError, match="shapes"):
            net(torch.ones(1, WIDTH + 1))
        assert under_way(net) == {"last.bias"}
    net.last.bias.norm()
    assert not under_way(net)


def test_a_use_on_another_thread_waits():
    net, optimizer = trained(Net(BALLAST))
    found = []
    thread = threading.Thread(target=lambda: found.append(net.first.weight.clone()))
    thread.start()
    thread.join()
    optimizer.synchronize()
    assert torch.equal(found[0], net.first.weight)


@pytest.mark.parametrize("first", ["the model", "a part of it"])
def test_a_forward_in_evaluation_waits_for_everything_beneath(first):
    net, _ = trained(ShortCut())
    assert len(under_way(net)) == 6
    net.eval()
    if first == "a part of it":
        net.layers[0].first(batch(0, width=WIDTH))
        assert len(under_way(net)) == 4
    net(batch(0, width=WIDTH))
    assert net.seen == set()


def test_loose_parameters_are_waited_for_by_the_step():
    net, loose = Net(1 << 16), nn.Parameter(torch.ones(1000))
    optimizer = stepwell.OffloadAdamW([*net.parameters(), loose], model=net, lr=1e-2, threads=1)
    for step in range(3):
        loose.square().sum().backward()
        train_step(net, optimizer, step)
        assert len(under_way(net)) == 4
        assert type(loose) is nn.Parameter


def test_modules_and_parameters_that_came_later_wait():
    net, optimizer = trained(Net(1 << 16))
    net.late = nn.Linear(4, 4)
    optimizer.add_param_group({"params": list(net.late.named_parameters())})
    for step in range(2):
        optimizer.zero_grad()
        (net(batch(step, width=WIDTH)).sum() + net.late(torch.ones(1, 4)).sum()).backward()
        optimizer.step()
    assert len(under_way(net)) == 6
    net.late(torch.ones(1, 4))
    assert len(under_way(net)) == 4


DESCRIPTIONS = {
    "shape": lambda p: (p.shape, p.size(0), p.dim(), p.numel(), len(p), p.stride()),
    "dtype": lambda p: (p.dtype, p.is_floating_point(), torch.is_complex(p), p.element_size()),
    "autograd": lambda p: (p.requires_grad, p.is_leaf, p.grad_fn, p._version, p.requires_grad_()),
    "grad": lambda p: (p.grad, setattr(p, "grad", torch.ones_like(p.grad)), delattr(p, "grad")),
    "hooks": lambda p: p.register_hook(lambda grad: grad).remove(),
    "late hooks": lambda p: p.register_post_accumulate_grad_hook(lambda _: None).remove(),
    "identity": lambda p: (p in {p}, hash(p), isinstance(p, nn.Parameter)),
}


@pytest.mark.parametrize("describe", DESCRIPTIONS.values(), ids=DESCRIPTIONS.keys())
def test_descriptions_do_not_wait(describe):
    net, _ = trained(Net(1 << 16))
    describe(net.last.weight)
    assert len(under_way(net)) == 4


def saved(value):
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def by_torch_save(value):
    return torch.load(io.BytesIO(saved(value)), weights_only=False)


USES = {
    "add": lambda p: 2 * p + 1,
    "data": lambda p: p.data,
    "detach": lambda p: p.detach(),
    "to": lambda p: p.to(torch.float64),
    "numpy": lambda p: torch.from_numpy(p.detach().numpy()),
    "index": lambda p: p[1:, 2],
    "storage": lambda p: torch.tensor(p.untyped_storage()[:64].tolist()),
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": lambda p: pickle.loads(pickle.dumps(p)),
    "torch.save": by_torch_save,
    "foreach": lambda p: torch._foreach_mul([p], 3)[0],
    "keyword": lambda p: torch.mul(input=torch.ones(()), other=p),
    "vector": lambda p: nn.utils.parameters_to_vector([p]),
    "linear": lambda p: nn.functional.linear(torch.ones(1, WIDTH), p),
    "as another class": lambda p: type(p)(p.data),
    "into another": lambda p: torch.zeros_like(p).copy_(p),
    "repr": lambda p: torch.tensor(bytearray(repr(p).encode())),
    "add_": lambda p: p.add_(1),
    "data.mul_": lambda p: p.data.mul_(2),
    "index_put": lambda p: p.__setitem__(0, 7),
    "data =": lambda p: setattr(p, "data", 2 * p.data),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES.keys())
@torch.no_grad()
def test_uses_get_the_new_weight(use):
    with torch.enable_grad():
        net = Net(BALLAST)
        (net, _), (other, optimizer) = (trained(each) for each in (net, copy.deepcopy(net)))
    optimizer.synchronize()
    found, expected = use(net.first.weight), use(other.first.weight)
    assert type(found) is type(expected)
    if found is not None:
        assert torch.equal(found, expected)
    assert torch.equal(net.first.weight, other.first.weight)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_clearing_gradients_waits_for_nothing(set_to_none):
    net, optimizer = trained(Net(1 << 16))
    optimizer.zero_grad(set_to_none=set_to_none)
    net.zero_grad()
    assert len(under_way(net)) == 4
    assert all(param.grad is None for param in net.parameters())


class OtherParameter(nn.Parameter):
    pass


def test_a_parameter_of_another_class_is_waited_for_in_the_step():
    net = Net(BALLAST)
    net.last.weight = OtherParameter(net.last.weight.detach())
    net, optimizer = trained(net)
    assert under_way(net) - {"last.weight"} == {"first.weight", "first.bias", "last.bias"}
    found = net.last.weight.detach().clone()
    optimizer.synchronize()
    assert torch.equal(net.last.weight, found)


# ---- copies, and the end ----


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, by_torch_save, lambda m: pickle.loads(pickle.dumps(m))]
)
def test_copies_of_a_model_wait_for_nothing(copied):
    net, optimizer = trained(Net(1 << 16))
    other = copied(net)
    train_step(net, optimizer, 3)
    other(batch(0, width=WIDTH))
    other.load_state_dict(other.state_dict())
    assert len(under_way(net)) == 4


def test_a_saved_model_needs_no_stepwell():
    net, _ = trained(Net(1 << 16))
    assert b"stepwell" not in saved(nn.Sequential(net))
    assert b"stepwell" not in pickle.dumps(nn.Sequential(net))


def test_hooks_go_with_the_optimizer():
    net, optimizer = trained(Net(1 << 16), accumulate="host")
    weight = net.last.weight
    del optimizer
    gc.collect()
    assert type(weight) is nn.Parameter
    for module in net.modules():
        assert not module._forward_pre_hooks and not module._forward_hooks
        assert not module._state_dict_pre_hooks and not module._load_state_dict_pre_hooks
    for param in net.parameters():
        assert not param._post_accumulate_grad_hooks and not param._backward_hooks


def test_an_optimizer_does_not_keep_the_model():
    net, optimizer = trained(Net(1 << 16))
    is_alive = weakref.ref(net)
    del net
    gc.collect()
    assert is_alive() is None
    optimizer.step()


def test_two_models_and_two_optimizers():
    def alternate(gives_model):
        torch.manual_seed(0)
        nets = [Net(BALLAST), Net(BALLAST)]
        optimizers = [
            stepwell.OffloadAdamW(
                reversed_params(net), model=net if gives_model else None, lr=1e-2, threads=1
            )
            for net in nets
        ]
        losses = []
        for step in range(6):
            losses.append(train_step(nets[step % 2], optimizers[step % 2], step))
            losses.append(nets[1 - step % 2](batch(step, width=WIDTH)).sum().item())
        return losses

    assert alternate(gives_model=True) == alternate(gives_model=False)


# ---- other memory, and other code ----


@pytest.mark.parametrize(
    "keep", [lambda p: p.data, lambda p: p.detach().numpy(), lambda p: p.view(-1)[:5].detach()]
)
def test_what_was_kept_of_a_weight_is_there_behind_the_step(keep):
    net, optimizer = trained(Net(BALLAST))
    kept = keep(net.first.weight)
    train_step(net, optimizer, 3)
    found = copy.deepcopy(kept)
    optimizer.synchronize()
    assert torch.equal(torch.as_tensor(found), torch.as_tensor(kept))


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_a_model_that_is_traced_has_every_step_wait():
    net, optimizer = trained(Net(BALLAST))
    x = batch(0, width=WIDTH)
    traced = torch.jit.trace(net, x, check_trace=False)
    for step in range(3):
        train_step(net, optimizer, step)
        assert not under_way(net)
        assert torch.equal(traced(x), net(x))


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_a_script_of_a_model_says_what_to_do():
    net, _ = trained(nn.Sequential(nn.Linear(WIDTH, 4)))
    with pytest.raises(AttributeError, match="hint: script the module before the optimizer is"):
        torch.jit.script(net)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_a_model_of_scripts_has_every_step_wait():
    net = nn.Sequential(torch.jit.script(nn.Linear(WIDTH, 4)), nn.Linear(4, 4))
    trained(net)
    assert not under_way(net)


def test_an_exported_model_has_nothing_of_ours():
    net, _ = trained(nn.Sequential(nn.Linear(WIDTH, 4), nn.Tanh()))
    x = batch(0, width=WIDTH)
    exported = torch.export.export(net, (x,))
    assert "stepwell" not in str(exported.graph)
    assert torch.equal(exported.module()(x), net(x))
