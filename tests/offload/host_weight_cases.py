"""Models whose weights lie in host memory, and programs that train them."""

import contextlib
import math
from unittest import mock

import stepwell
import torch
from stepwell.store import staying
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

WIDTH, WORDS, STEPS = 32, 50, 4


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.up, self.down = torch.nn.Linear(WIDTH, 64), torch.nn.Linear(64, WIDTH)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(torch.nn.Module):
    """`reentrant`: of the checkpoints of its layers; None: there are none."""

    def __init__(self, layers=None, reentrant=None):
        super().__init__()
        self.embed = torch.nn.Embedding(WORDS, WIDTH)
        self.layers = torch.nn.ModuleList(layers or (Block() for _ in range(3)))
        self.head = torch.nn.Linear(WIDTH, WORDS, bias=False)
        self.register_buffer("scale", torch.ones(WIDTH))
        self.reentrant = reentrant

    def called(self, layer, x):
        if self.reentrant is None or not self.training:
            return layer(x)
        return checkpoint(layer, x, use_reentrant=self.reentrant)

    def forward(self, words):
        x = self.embed(words) * self.scale
        for layer in self.layers:
            x = self.called(layer, x)
        return self.head(x)


def words_of(net, step):
    drawn = torch.randint(0, WORDS, (4, 8), generator=torch.Generator().manual_seed(step))
    return drawn.to(net.scale.device)


def loss_of(net, step, call=None):
    words = words_of(net, step)
    return cross_entropy((call or net)(words).float().flatten(0, 1), words.flatten())


def is_same(ours, theirs):
    with contextlib.suppress(AssertionError):
        assert_same(ours, theirs)
        return True
    return False


def bits(tensor):
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def assert_same(ours, theirs):
    if isinstance(ours, torch.Tensor):
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        assert torch.equal(bits(ours), bits(theirs))
    elif isinstance(ours, dict):
        assert list(ours) == list(theirs)
        for key, value in ours.items():
            assert_same(value, theirs[key])
    elif isinstance(ours, (list, tuple)):
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs, strict=True):
            assert_same(one, other)
    else:
        assert ours == theirs


def room_for(net, stays):
    """A `device_bytes_max` with which some weights stay on the device, or all with some state."""
    weights = sum(param.nbytes for param in net.parameters())
    if stays == "state":
        return weights + 6 * sum(param.numel() for param in net.parameters())
    return {None: 0, "ends": math.ceil(0.8 * weights)}[stays]


def made(weights, device, make=Net, dtype=torch.bfloat16, stays=None, **options):
    """A model with its optimizer; weights in host memory begin on the CPU.

    `stays`: as `room_for` has it.
    """
    torch.manual_seed(0)
    net = make().to(dtype)
    if weights == "host":
        options["device"] = device
    else:
        net.to(device)
    options = {"lr": 1e-2, "clip_norm": 1.0, **options}
    if stays is None:
        return net, stepwell.OffloadAdamW(net, weights=weights, **options)
    options["device_bytes_max"] = room_for(net, stays)
    # Beside what is fetched ahead of its use nothing of a small model would fit.
    with mock.patch.object(staying, "AHEAD_NUMEL", 1):
        return net, stepwell.OffloadAdamW(net, weights=weights, **options)


def trained(weights, device, loss=loss_of, then=None, backwards=1, **made_with):
    """What a program sees in some steps, and what there is at the end."""
    net, optimizer = made(weights, device, **made_with)
    seen, kept = [], {}
    for step in range(STEPS):
        for nth in range(backwards):
            value = loss(net, step + 100 * nth)
            value.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(value.item())
        # Only the step behind a write tells what has become of the state.
        if then is not None and step < STEPS - 1:
            seen.append(then(net, optimizer, step, kept))
    net.eval()
    with torch.no_grad():
        seen.append(net(words_of(net, 0)))
    return seen, net.state_dict(), optimizer.state_dict()["state"]


def assert_trains_alike(device, stays=(None, "ends", "state"), **program):
    expected = trained("device", device, **program)
    for each in stays:
        assert_same(trained("host", device, stays=each, **program), expected)


# ---- models ----


class Adapted(torch.nn.Module):
    """A frozen layer with a trained part of low rank."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.a = torch.nn.Parameter(torch.randn(4, layer.in_features))
        self.b = torch.nn.Parameter(torch.zeros(layer.out_features, 4))

    def forward(self, x):
        return self.layer(x) + x @ self.a.t() @ self.b.t()


class Output:
    """What no one sees a tensor in."""

    def __init__(self, x):
        self.x = x


class Unseen(torch.nn.Module):
    """Uses a weight of a module that is not called, and returns what is not looked into."""

    def __init__(self):
        super().__init__()
        self.own = torch.nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.1)
        self.uncalled = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return Output(torch.nn.functional.linear(x @ self.own, self.uncalled.weight))


class Unseeing(Net):
    def __init__(self):
        super().__init__([Unseen(), Unseen()])

    def called(self, layer, x):
        return layer(x).x


class Skipping(Net):
    """Leaves a layer out now and then."""

    def forward(self, words):
        x = self.embed(words)
        for nth, layer in enumerate(self.layers):
            if nth != 1 or int(words.sum()) % 2:
                x = layer(x)
        return self.head(x)


class Twice(torch.nn.Module):
    """Uses its input twice, and returns a view of its weight."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.1)

    def forward(self, x):
        return {
            "x": x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1),
            "weight": self.weight.t(),
        }


class Returning(torch.nn.Module):
    """Uses its input a third time, and the weight that its module returns."""

    def __init__(self):
        super().__init__()
        self.inner, self.up = Twice(), torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        found = self.inner(x)
        return x + self.up(found["x"] @ found["weight"])


def returning(reentrant):
    return Net([Returning(), Returning()], reentrant=reentrant)


def renormed():
    net = Net()
    net.embed.max_norm = 1.0
    return net


class Routed(torch.nn.Module):
    """Leaves a loss that is made last, and so goes back first."""

    def __init__(self):
        super().__init__()
        self.own = torch.nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.1)
        self.gain = torch.nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        y = x @ self.own
        self.loss = 1e-3 * (y.sin() * self.gain).sum()
        return y


class Listing(Routed):
    """Leaves its loss in a list."""

    def __init__(self):
        super().__init__()
        self.losses = []

    def forward(self, x):
        y = super().forward(x)
        self.losses.append(self.loss)
        del self.loss
        return y


class Writing(Net):
    """Writes weights in its forward."""

    def forward(self, words):
        # What is written behind the last step is in no state yet.
        self.embed.max_norm = 0.5 if self.training else None
        if self.training:
            with torch.no_grad():
                self.head.weight.clamp_(-0.05, 0.05)
        return super().forward(words)


class Recursive(torch.nn.Module):
    """Calls itself."""

    def __init__(self):
        super().__init__()
        self.own = torch.nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.1)

    def forward(self, x, times=3):
        return (self(x, times - 1) if times else x) + torch.tanh(x @ self.own)


class WithNothing(Net):
    """Has a weight without elements."""

    def __init__(self):
        super().__init__()
        self.nothing = torch.nn.Parameter(torch.zeros(0))

    def forward(self, words):
        return super().forward(words) + self.nothing.sum()


def tied():
    net = Net()
    net.head.weight = net.embed.weight
    return net


def partly_frozen():
    net = Net()
    net.embed.requires_grad_(False)
    net.layers[1].requires_grad_(False)
    return net


def adapted(reentrant):
    net = Net(reentrant=reentrant).requires_grad_(False)
    for layer in net.layers:
        layer.up, layer.down = Adapted(layer.up), Adapted(layer.down)
    return net


def attending():
    encoder = torch.nn.TransformerEncoderLayer
    return Net([encoder(WIDTH, 4, 64, 0.0, batch_first=True) for _ in range(2)])


def compiled_layers():
    net = Net()
    for layer in net.layers:
        layer.compile(backend="aot_eager")
    return net


def nbytes_there(param):
    """Bytes of a weight that are on the device."""
    with torch._C.DisableTorchFunctionSubclass():
        return param.untyped_storage().nbytes()


def is_away(param):
    return nbytes_there(param) == 0


def resident_bytes(net):
    """Bytes of weights that are on the device."""
    return sum({id(param): nbytes_there(param) for param in net.parameters()}.values())
