"""What the tests of `stepwell.OffloadAdamW` share.

Models with their twins under `stepwell.AdamW`, and training steps.
"""

import copy

import stepwell
import torch
from optim_cases import bits

WIDTH = 96
# So many elements take a worker some milliseconds; a forward that does not wait reads its weights
# microseconds after the step.
BALLAST = 6 << 20
# Where forwards wait for a step, and a step whose last backward is told: it copies in it.
MODES = [{}, {"gives_model": False}, {"accumulation_steps": 1}]
MODE_IDS = ["forwards", "step", "told"]


class Net(torch.nn.Module):
    """A first layer, and a last one whose weight is so large that a step takes long."""

    def __init__(self, ballast=BALLAST):
        super().__init__()
        self.first = torch.nn.Linear(WIDTH, WIDTH)
        self.last = torch.nn.Linear(WIDTH, ballast // WIDTH)

    def forward(self, x):
        # A few rows of the last layer: a large weight, little work.
        return self.last.weight[:4] @ torch.tanh(self.first(x)).t() + self.last(x[:0]).sum()


def reversed_params(net):
    """The order in which the first layer gets its weights last."""
    return list(net.parameters())[::-1]


def small(dtype=torch.float32):
    torch.manual_seed(1)
    return torch.nn.Sequential(
        torch.nn.Linear(7, 500), torch.nn.Tanh(), torch.nn.Linear(500, 150), torch.nn.Linear(150, 3)
    ).to(dtype)


def batch(step, dtype=torch.float32, width=7, rows=4):
    return (torch.linspace(-1, 1, rows * width).view(rows, width) + 0.1 * step).to(dtype)


def loss_of(net, step, width=7):
    dtype = next(net.parameters()).dtype
    return net(batch(step, dtype, width)).float().square().sum()


def train(net, optimizer, steps, first=0, scheduler=None, width=7):
    """The losses of some steps."""
    losses = []
    for step in range(first, first + steps):
        optimizer.zero_grad()
        loss = loss_of(net, step, width)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if scheduler is not None:
            scheduler.step()
    return losses


def train_step(call, optimizer, step):
    """The loss of a step of a `Net`, or of what calls one."""
    optimizer.zero_grad()
    loss = call(batch(step, width=WIDTH)).square().sum()
    loss.backward()
    optimizer.step()
    return loss.item()


def pair(net=None, dtype=torch.float32, *, gives_model=True, **options):
    """A model under OffloadAdamW, and the same under AdamW.

    Returns ((model, optimizer), (model, optimizer)).
    """
    net = small(dtype) if net is None else net
    twin = copy.deepcopy(net)
    ours = {"accumulation_steps", "clip_norm", "threads", "host_bytes_max", "accumulate"}
    plain = {name: value for name, value in options.items() if name not in ours}
    options = {"lr": 1e-2, **options}
    model = net if gives_model else None
    return (
        (net, stepwell.OffloadAdamW(net.named_parameters(), model=model, **options)),
        (
            twin,
            stepwell.AdamW(twin.named_parameters(), **{"lr": 1e-2, "nonfinite": "skip", **plain}),
        ),
    )


def assert_equal(one, other):
    """Both (model, optimizer) are the same to the bit: parameters, masters and moments."""
    (net, optimizer), (twin, reference) = one, other
    for each in (optimizer, reference):
        if isinstance(each, stepwell.OffloadAdamW):
            # After it all of `state` is as it is saved.
            each.state_dict()
    params = zip(net.named_parameters(), twin.parameters(), strict=True)
    for (name, param), expected in params:
        assert torch.equal(bits(param), bits(expected)), name
        state, reference_state = optimizer.state.get(param, {}), reference.state.get(expected, {})
        assert state.keys() == reference_state.keys(), name
        for key, value in state.items():
            assert torch.equal(bits(value), bits(reference_state[key])), f"{key} of {name}"
