"""The program (see deepspeed_run) of Stepwell's hooks that fetch offloaded weights on one rank.

Each model trains with them and with DeepSpeed's.
"""

import contextlib
import gc
import weakref
from unittest import mock

import torch
from deepspeed_engines import initialize, vectors
from deepspeed_offload_param_programs import Adapted, offloaded, weights
from insides import fetcher_of, num_elements_ahead, num_elements_live
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

# Few elements, so that weights leave and come again within a pass.
TIGHT = {
    "stage3_prefetch_bucket_size": 600,
    "stage3_max_reuse_distance": 0,
    "stage3_max_live_parameters": 3000,
}
STEPS = 5


class Model(torch.nn.Module):
    """Three layers of 32 channels."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(32, 32) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Scaled(Model):
    """Has weights of one element: one is its own, and one is of a layer."""

    class Scale(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.factor = torch.nn.Parameter(torch.ones(1))

        def forward(self, x):
            return x * self.factor

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.full((1,), 1.5))
        self.layers[1] = self.Scale()

    def forward(self, x):
        return super().forward(x) * self.scale


class Tied(Model):
    """The last layer has the weight of the first."""

    def __init__(self):
        super().__init__()
        self.layers[2].weight = self.layers[0].weight


class Twice(Model):
    """A layer is called twice; between the calls is another."""

    def forward(self, x):
        first, second, third = self.layers
        return third(torch.tanh(first(torch.tanh(second(first(x))))))


class Reentrant(Model):
    """In the older way, in which inputs of each part are leaves."""

    def forward(self, x):
        x.requires_grad_()
        for layer in self.layers:
            x = torch.tanh(checkpoint(layer, x, use_reentrant=True))
        return x


class AdaptedAgain(Adapted):
    """Frozen weights, and activations that are computed again."""

    def forward(self, x):
        return checkpoint(super().forward, x.requires_grad_(), use_reentrant=False)


class Reaching(Model):
    """Uses a weight of a layer that it does not call, and those that others return."""

    class Giver(torch.nn.Module):
        def __init__(self, *, is_named):
            super().__init__()
            self.is_named = is_named
            self.bias = torch.nn.Parameter(torch.ones(32))
            self.inner = torch.nn.Linear(32, 32)
            # DeepSpeed does not see that it is taken from here.
            self.held = [self.inner.weight]

        def forward(self, x):
            given = {"x": x * 2, "own": self.bias, "inner": self.inner.bias, "held": self.held[0]}
            return given if self.is_named else tuple(given.values())

    def __init__(self):
        super().__init__()
        self.giver = self.Giver(is_named=False)
        self.namer = self.Giver(is_named=True)

    def forward(self, x):
        x, own, inner, held = self.giver(self.layers[0](x))
        x = functional.linear(functional.linear(x, self.layers[1].weight), held, own * inner)
        named = self.namer(x)
        x = functional.linear(named["x"], named["held"], named["own"] * named["inner"])
        return self.layers[2](x)


class Wandering(Model):
    """Calls its layers in another order each time."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        for index in range(self.calls % 3, self.calls % 3 + 2):
            x = torch.tanh(self.layers[index % 3](x))
        return x + sum(layer.bias.sum() * 0 for layer in self.layers)


MODELS = (
    Model,
    Tied,
    Twice,
    Reentrant,
    AdaptedAgain,
    Reaching,
    Wandering,
)


def loss_of(engine, x):
    return engine(x.to(torch.bfloat16)).float().square().mean()


def trained(model, config, steps=STEPS, between=None, rank=0):
    """Losses, weights, and the most elements that were on the device at once."""
    torch.manual_seed(0)
    engine = initialize(model(), config)
    losses, most = [], 0
    params = list(engine.module.parameters())

    def count(*_):
        nonlocal most
        live = sum(param.numel() for param in params if param.ds_status.name == "AVAILABLE")
        most = max(most, live)

    def count_in_backward(module, args, output):
        if isinstance(output, torch.Tensor) and output.requires_grad:
            output.register_hook(count)

    for module in engine.module.modules():
        module.register_forward_pre_hook(count)
        module.register_forward_hook(count_in_backward)
    for step, batch in enumerate(vectors(steps, rank=rank)):
        loss = loss_of(engine, batch)
        if between is not None:
            between(engine, step)
        engine.backward(loss)
        count()
        engine.step()
        losses.append(float(loss))
    result = {"losses": losses, "weights": weights(engine), "most": most}
    engine.destroy()
    return result


def both(model, *, steps=STEPS, between=None, **options):
    """With Stepwell's hooks and with DeepSpeed's."""
    return [
        trained(
            model, offloaded(stepwell={"fetch": fetch}, **options), steps=steps, between=between
        )
        for fetch in ("stepwell", "deepspeed")
    ]


def evaluate(engine, step):
    """A forward without gradients between a forward and its backward."""
    if step in (1, 2):
        engine.eval()
        with torch.no_grad():
            loss_of(engine, torch.ones(2, 32))
        engine.train()


def write(engine, step):
    """Writes weights between a forward and its backward, as a program that syncs them does."""
    import deepspeed

    if step == 3:
        params = list(engine.module.parameters())
        with torch.no_grad(), deepspeed.zero.GatheredParameters(params, modifier_rank=0):
            for param in params:
                param.data.mul_(1.5)


def unhook(engine, step):
    """Removes the hooks for a while, as programs that generate do."""
    from deepspeed.runtime.zero.stage3 import unwrap_model_for_generation

    if step == 1:
        with unwrap_model_for_generation(engine), torch.no_grad():
            assert engine.module(torch.ones(2, 32, dtype=torch.bfloat16)).shape == (2, 32)


def failing(fetch):
    """A forward that raises in the middle, and the steps after it."""
    engine = initialize(Model(), offloaded(stepwell={"fetch": fetch}))
    losses = []
    for step, batch in enumerate(vectors(STEPS)):
        if step == 2:
            handle = engine.module.layers[1].register_forward_hook(lambda *_: 1 / 0)
            try:
                loss_of(engine, batch)
            except ZeroDivisionError:
                handle.remove()
        loss = loss_of(engine, batch)
        engine.backward(loss)
        engine.step()
        losses.append(float(loss))
    found = {"losses": losses, "weights": weights(engine)}
    engine.destroy()
    return found


def tokens(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, 64, (2, 12), generator=generator)


def generate(engine, step):
    """Samples from the model, by greedy search and by chance, with and without a cache of keys."""
    prompt = tokens(100 + step)[:, :4]
    options = {"max_new_tokens": 4, "use_cache": step % 2 == 0, "pad_token_id": 0}
    torch.manual_seed(step)
    found = [
        engine.module.generate(prompt, do_sample=chance, **options) for chance in (False, True)
    ]
    return torch.cat(found)


def inferred(engine, step):
    """A forward whose tensors autograd never sees."""
    with torch.inference_mode():
        return engine.module(input_ids=tokens(step)).logits.clone()


def spoken(fetch, look):
    """Trains a language model, which is looked at in evaluation mode before each step's forward."""
    from deepspeed_engines import llama

    model = llama()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    engine = initialize(model, offloaded(stepwell={"fetch": fetch}, zero=TIGHT))
    losses, looks = [], []
    for step in range(3):
        engine.eval()
        found = look(engine, step)
        looks.append(torch.as_tensor(found).clone())
        engine.train()
        loss = engine(input_ids=tokens(step), labels=tokens(step)).loss
        if look is generate:
            # Between a forward and its backward.
            engine.eval()
            looks.append(look(engine, step))
            engine.train()
        engine.backward(loss)
        engine.step()
        losses.append(float(loss))
    result = {"losses": losses, "weights": weights(engine), "looks": looks}
    engine.destroy()
    return result


def counted():
    """What the fetcher has on the device after a step, and how DeepSpeed's stack stands."""
    from deepspeed.runtime.zero import parameter_offload
    from deepspeed.runtime.zero.muon import original_muon

    engine = initialize(AdaptedAgain(), offloaded(zero=TIGHT))
    depth = len(parameter_offload.FWD_MODULE_STACK)
    for batch in vectors(STEPS):
        engine.backward(loss_of(engine, batch))
        engine.step()
    fetcher = fetcher_of(engine.optimizer)
    loss_of(engine, batch)
    engine.optimizer._partition_all_parameters()
    found = {
        "live": num_elements_live(fetcher),
        "ahead": num_elements_ahead(fetcher),
        "depth": len(parameter_offload.FWD_MODULE_STACK) - depth,
        "class": type(engine.optimizer._get_param_coordinator()).__name__,
        "plan": engine.stepwell_plan.fetch,
        # To compile its functions takes seconds.
        "is_muon_compiled": hasattr(original_muon.muon_update, "_torchdynamo_orig_callable"),
    }
    engine.destroy()
    return found


def changed():
    """What steps, and what fetches, where DeepSpeed's coordinator is another."""
    from deepspeed.runtime.zero.partitioned_param_coordinator import (
        PartitionedParameterCoordinator as Theirs,
    )

    release = Theirs.release_and_reset_all
    with mock.patch.object(Theirs, "release_and_reset_all", lambda *args: release(*args)):
        engine = initialize(Model(), offloaded())
        engine.backward(loss_of(engine, next(vectors(1))))
        engine.step()
    found = engine.optimizer, engine.optimizer._get_param_coordinator()
    engine.destroy()
    return [type(each).__name__ for each in found]


def destroyed(*, raises):
    """Whether an optimizer is alive behind `destroy`, and how DeepSpeed's stack stands."""
    from deepspeed.runtime.zero import parameter_offload

    depth = len(parameter_offload.FWD_MODULE_STACK)
    engine = initialize(Model(), offloaded())
    for batch in vectors(STEPS):
        engine.backward(loss_of(engine, batch))
        engine.step()
    if raises:
        with contextlib.suppress(RuntimeError):
            loss_of(engine, batch[:, 1:])
    optimizer = weakref.ref(engine.optimizer)
    engine.destroy()
    del engine
    gc.collect()
    return optimizer() is not None, len(parameter_offload.FWD_MODULE_STACK) - depth


def copy_as_a_device_does():
    """On a CPU weights are the partitions themselves; here they are copies, as on a GPU."""
    from stepwell.weights.lane import Lane

    copy = Lane.copy

    def copying(self, weights):
        wholes, arrival = copy(self, weights)
        return [whole.clone() for whole in wholes], arrival

    Lane.copy = copying


def program_fetch(result):
    """All that one rank does."""
    import stepwell.deepspeed

    stepwell.deepspeed.register()
    copy_as_a_device_does()
    for model in MODELS:
        result[model.__name__] = both(model, zero=TIGHT)
    result["roomy"] = both(Model)
    result["persistent"] = both(Model, persistent=100)
    result["accumulated"] = both(Tied, gradient_accumulation_steps=2)
    result["evaluated"] = both(Tied, between=evaluate, zero=TIGHT)
    result["written"] = both(Scaled, between=write)
    result["unhooked"] = both(Model, between=unhook)
    result["failing"] = [failing(fetch) for fetch in ("stepwell", "deepspeed")]
    for look in (generate, inferred):
        result[look.__name__] = [spoken(fetch, look) for fetch in ("stepwell", "deepspeed")]
    result["counted"] = counted()
    result["changed"] = changed()
    result["destroyed"] = [destroyed(raises=raises) for raises in (False, True)]
