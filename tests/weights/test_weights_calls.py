"""A model whose weights come for its calls: the results and gradients of one that has them."""

import copy

import pytest
import torch
from insides import num_elements_ahead, num_elements_live
from stepwell.weights.calls import Calls
from stepwell.weights.fetcher import Fetcher
from stepwell.weights.lane import Lane
from torch.utils.checkpoint import checkpoint

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


class Weight:
    """Of a parameter, whose elements are in host memory."""

    is_persistent = stays = False

    def __init__(self, param):
        self.param, self.key, self.users = param, id(param), set()
        self.numel = self.part_numel = param.numel()
        self.shape, self.source = param.shape, param.detach().cpu().flatten()
        self.drop()

    def copy(self, source, device):
        return source.to(device, non_blocking=True)

    def put(self, whole):
        self.param.data, self.state = whole, True

    def discard(self):
        pass

    rest = resume = discard

    def drop(self):
        self.param.data, self.state = self.param.data.new_empty(0), False


class Model(torch.nn.Module):
    """Calls one layer twice, and computes two of them again in the backward."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(4))
        self.layers[1].weight.requires_grad_(False)
        self.scale = torch.nn.Parameter(torch.ones(8))

    def forward(self, x):
        first, second, third, last = self.layers
        x = checkpoint(lambda x: second(first(x).sin()), x, use_reentrant=False)
        return {"out": last(third(first(x)).relu()) * self.scale}


class Streamed:
    """A model whose weights are in host memory."""

    def __init__(self, model, *, ahead):
        self.weights = {id(param): Weight(param) for param in model.parameters()}
        device = next(model.parameters()).device
        limits = {"prefetch_numel_max": ahead, "reuse_numel_max": 0, "live_numel_max": 1000}
        self.fetcher = Fetcher(Lane(device), there=True, absent=False, **limits)
        self.stack = []
        calls = Calls(
            self.fetcher,
            self.weights_of,
            stack=self.stack,
            map_tensors=lambda function, value: {
                key: function(each) for key, each in value.items()
            },
            on_output=self.look,
        )
        calls.watch_passes(model)
        for module in model.modules():
            calls.watch(module)

    def weights_of(self, module):
        return [self.weights[id(param)] for param in module._parameters.values()]

    def look(self, module, output):
        assert all(weight.state for weight in self.weights_of(module))

    def there(self):
        return [weight for weight in self.weights.values() if weight.state]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("ahead", [0, 100])
def test_results_and_gradients_are_those_of_a_model_that_has_its_weights(device, ahead):
    model = Model().to(device)
    resident = copy.deepcopy(model)
    streamed = Streamed(model, ahead=ahead)
    for _ in range(3):
        x = torch.randn(2, 8, device=device)
        found, expected = (each(x)["out"] for each in (model, resident))
        assert torch.equal(found, expected)
        assert len(streamed.there()) < len(streamed.weights)
        found.square().sum().backward()
        streamed.fetcher.end_backward()
        expected.square().sum().backward()
        for one, other in zip(model.parameters(), resident.parameters(), strict=True):
            assert one.grad is other.grad or torch.equal(one.grad, other.grad)
    streamed.fetcher.free_all(list(streamed.weights.values()))
    assert num_elements_live(streamed.fetcher) == num_elements_ahead(streamed.fetcher) == 0
    assert streamed.there() == []
    assert not any(weight.users for weight in streamed.weights.values())


def test_a_forward_that_raises_is_over_with_the_next_pass():
    model = Model()
    streamed = Streamed(model, ahead=0)
    with pytest.raises(RuntimeError):
        model(torch.ones(2, 7))
    assert streamed.stack == [model, model.layers[0]]
    out = model(torch.ones(2, 8))["out"]
    assert streamed.stack == []
    out.sum().backward()
    streamed.fetcher.end_backward()
    assert streamed.there() == []
