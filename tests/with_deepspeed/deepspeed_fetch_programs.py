"""The program (see deepspeed_run) of Stepwell's hooks that fetch offloaded weights on one rank.

Each model trains with them and with DeepSpeed's.
"""

import contextlib
import functools
import gc
import time
import weakref
from unittest import mock

import torch
from deepspeed_engines import initialize, vectors
from deepspeed_offload_param_programs import Adapted, offloaded, weights
from insides import fetcher_of, num_elements_ahead, num_elements_live, partitions_of
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


class Checkpointed(Model):
    """Activations are computed again in the backward."""

    def forward(self, x):
        x.requires_grad_()
        for first, second in ((self.layers[0], self.layers[1]), (self.layers[2], self.layers[1])):
            x = checkpoint(
                lambda x, first, second: torch.tanh(second(torch.tanh(first(x)))),
                x,
                first,
                second,
                use_reentrant=False,
            )
        return x


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


class InPlace(Model):
    """Writes outputs in place, of which one is a view."""

    class Shaped(torch.nn.Linear):
        def forward(self, x):
            return functional.linear(x, self.weight, self.bias).clone().view(-1, 4, 8)

    def __init__(self):
        super().__init__()
        self.layers[1] = self.Shaped(32, 32)

    def forward(self, x):
        x = self.layers[0](x).clone().relu_()
        x = self.layers[1](x)
        x.add_(1.0)
        return self.layers[2](x.view(-1, 32))


class Named(Model):
    """A module within returns a dict, and one gets its input by name."""

    class Inner(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(32, 32)
            self.scale = torch.nn.Parameter(torch.ones(32))

        def forward(self, x):
            return {"x": self.linear(input=x) * self.scale, "n": 3}

    def __init__(self):
        super().__init__()
        self.inner = self.Inner()

    def forward(self, x):
        return super().forward(self.inner(x)["x"])


class Paired(Model):
    """A module within gets its input in a tuple, and one returns a view of its weight."""

    class Pair(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(32, 32)
            self.scale = torch.nn.Parameter(torch.ones(32))

        def forward(self, pair, name):
            x, factor = pair
            return self.linear(x) * self.scale * factor

    class Turned(torch.nn.Linear):
        def forward(self):
            return self.weight.t()

    def __init__(self):
        super().__init__()
        self.layers[0] = self.Pair()
        self.layers[1] = self.Turned(32, 32, bias=False)

    def forward(self, x):
        x = self.layers[0]((self.layers[2](x), 2.0), "x")
        return x @ self.layers[1]()


class Wandering(Model):
    """Calls its layers in another order each time."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        for index in range(self.calls % 3, self.calls % 3 + 2):
            x = torch.tanh(self.layers[index % 3](x))
        return x + sum(layer.bias.sum() * 0 for layer in self.layers)


class Leafy(Model):
    """Its inner module is fetched as a whole."""

    def __init__(self):
        super().__init__()
        self.layers[1] = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Linear(32, 32))
        self.layers[1]._z3_leaf = True


MODELS = (
    Model,
    Tied,
    Twice,
    Checkpointed,
    Reentrant,
    Adapted,
    AdaptedAgain,
    Reaching,
    InPlace,
    Named,
    Paired,
    Wandering,
    Leafy,
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


def failing(fetch, *, is_inferred=False):
    """A forward that raises in the middle, and the steps after it.

    In inference mode it raises where a module has its weights, and keeps them.
    """
    engine = initialize(Model(), offloaded(stepwell={"fetch": fetch}))
    losses = []
    for step, batch in enumerate(vectors(STEPS)):
        if step == 2:
            layer = engine.module.layers[1]
            hook = layer.register_forward_pre_hook if is_inferred else layer.register_forward_hook
            handle = hook(lambda *_: 1 / 0)
            try:
                with torch.inference_mode(is_inferred):
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


def stopped(engine, step):
    """Sampling that raises after two tokens."""
    prompt = tokens(100 + step)[:, :4]

    def stop(ids, *_):
        if ids.shape[1] == 6:
            raise InterruptedError
        return torch.zeros(len(ids), dtype=torch.bool)

    try:
        engine.module.generate(prompt, max_new_tokens=4, stopping_criteria=[stop], pad_token_id=0)
    except InterruptedError:
        return prompt
    raise AssertionError("it went on")


def scored(engine, step):
    """A loss of the model in evaluation mode, with its gradients: they count."""
    loss = engine(input_ids=tokens(step), labels=tokens(step)).loss
    engine.backward(loss)
    return loss.detach()


def inferred(engine, step):
    """A forward whose tensors autograd never sees."""
    with torch.inference_mode():
        return engine.module(input_ids=tokens(step)).logits.clone()


def spoken(fetch, look, *, checkpoints=False, zero=None):
    """Trains a language model, which is looked at in evaluation mode before each step's forward."""
    from deepspeed_engines import llama

    model = llama()
    if checkpoints:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    engine = initialize(model, offloaded(stepwell={"fetch": fetch}, zero=zero))
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


def waits_after_a_step():
    """How often a forward waits for parts of a step that is complete, and of one that is not."""
    from stepwell.deepspeed.zero.partitions import Partitions

    engine = initialize(Model(), offloaded())
    waits, wait = [], Partitions.wait_for

    def counted(self, fragments):
        fragments = list(fragments)
        waits.append(len(fragments))
        return wait(self, fragments)

    Partitions.wait_for = counted
    try:
        for batch in vectors(STEPS):
            engine.backward(loss_of(engine, batch))
            engine.step()
            deadline = time.monotonic() + 30
            while partitions_of(engine.optimizer).is_busy:
                assert time.monotonic() < deadline
            waits.clear()
            written = [
                type(param.ds_tensor) is not torch.Tensor for param in engine.module.parameters()
            ]
            loss_of(engine, batch)
    finally:
        Partitions.wait_for = wait
    engine.destroy()
    return written, waits


def compiled():
    """What a forward calls of the fetcher, and what of it a compiler would look into."""
    from stepwell.weights import calls as hooked

    engine = initialize(Model(), offloaded())
    fetcher = fetcher_of(engine.optimizer)
    calls, seen, hooks = [], [], []

    def uncompiled(hook, *args):
        hooks.append(hook)
        found = hook(*args)
        hooks.pop()
        return found

    def watched(name, method, *args):
        (calls if hooks else seen).append(name)
        return method(*args)

    for name in ("begin_pass", "enter", "leave"):
        setattr(fetcher, name, functools.partial(watched, name, getattr(fetcher, name)))
    with (
        torch.no_grad(),
        mock.patch.object(torch.compiler, "is_compiling", lambda: True),
        mock.patch.object(hooked, "_uncompiled", uncompiled),
    ):
        engine.module(next(vectors(1)).to(torch.bfloat16))
    engine.destroy()
    return calls, seen


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


def called():
    """What calls of the coordinator do, and a use of a weight that a program gathers."""
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    engine = initialize(Model(), offloaded())
    coordinator, layer = engine.optimizer._get_param_coordinator(), engine.module.layers[0]
    states = []
    for call in coordinator.fetch_sub_module, coordinator.release_sub_module:
        call(layer, forward=True)
        states.append((layer.weight.ds_status.name, len(layer.weight.ds_active_sub_modules)))
    layer.weight.ds_status = ZeroParamStatus.INFLIGHT
    try:
        layer(torch.ones(1, 32))
    except RuntimeError as error:
        return states, str(error)


def changed():
    """What steps, and what fetches, where DeepSpeed's coordinator is another."""
    from deepspeed.runtime.zero.partitioned_param_coordinator import (
        PartitionedParameterCoordinator as Theirs,
    )

    reset_step = Theirs.reset_step
    with mock.patch.object(Theirs, "reset_step", lambda self: reset_step(self)):
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
        result[model.__name__] = both(model)
        result[f"{model.__name__}, tight"] = both(model, zero=TIGHT)
    result["persistent"] = both(Model, persistent=100)
    result["accumulated"] = both(Tied, gradient_accumulation_steps=2)
    result["evaluated"] = both(Tied, between=evaluate, zero=TIGHT)
    result["written"] = both(Scaled, between=write)
    result["unhooked"] = both(Model, between=unhook)
    result["failing"] = [failing(fetch) for fetch in ("stepwell", "deepspeed")]
    result["failing, inferred"] = [
        failing("stepwell", is_inferred=True),
        result["failing"][0],
    ]
    result["generate"] = [spoken(fetch, generate) for fetch in ("stepwell", "deepspeed")]
    for look in (generate, stopped, scored, inferred):
        result[f"{look.__name__}, tight"] = [
            spoken(fetch, look, checkpoints=True, zero=TIGHT) for fetch in ("stepwell", "deepspeed")
        ]
    result["waits"] = waits_after_a_step()
    result["compiled"] = compiled()
    result["counted"] = counted()
    result["called"] = called()
    result["changed"] = changed()
    result["destroyed"] = [destroyed(raises=raises) for raises in (False, True)]
