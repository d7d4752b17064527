"""The programs of docs/other_trainers.md, run, and that of docs/guide.md with FSDP2's offload.

FSDP2 and Lightning are themselves; torchtitan and Megatron-Core are doubles, which call the
optimizer as these do.
"""

import re
import sys
import types
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import stepwell
import torch
from optim_cases import bits
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = DOCS / "other_trainers.md"

pytestmark = pytest.mark.skipif(not PAGE.is_file(), reason="the page is not beside the tests")


def programs(section, page=PAGE):
    """The programs of a section of the page."""
    text = page.read_text().partition(f"# {section}\n")[2].partition("\n##")[0]
    return re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def run(program, **names):
    """The names of a program after it has run with those given."""
    namespace = {"stepwell": stepwell, "torch": torch, **names}
    exec(compile(program, str(PAGE), "exec"), namespace)  # noqa: S102
    return namespace


def made_module(name, **members):
    module = types.ModuleType(name)
    module.__dict__.update(members)
    return module


def net():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))


def batch(step):
    return torch.linspace(-1, 1, 12).view(3, 4) + 0.1 * step


def train(model, optimizer, steps, first=0):
    for step in range(first, first + steps):
        optimizer.zero_grad()
        model(batch(step)).square().sum().backward()
        optimizer.step()


def weights(model):
    return torch.cat([param.detach().reshape(-1) for param in model.parameters()])


@pytest.fixture
def process_group():
    """This process is the only rank."""
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


def test_fsdp2(process_group, monkeypatch):
    from torch.distributed import fsdp

    if not torch.cuda.is_available():
        unpinned = partial(fsdp.CPUOffloadPolicy, pin_memory=False)
        monkeypatch.setattr(fsdp, "CPUOffloadPolicy", unpinned)
    model, twin = net(), net()
    (program,) = programs("Shards in host memory", DOCS / "guide.md")
    optimizer = run(program, model=model)["optimizer"]
    reference = stepwell.OffloadAdamW(twin, lr=1e-4, clip_norm=1.0, moments="q8")
    for step in range(3):
        train(model, optimizer, 1, step)
        for mine, param in zip(model.parameters(), twin.parameters(), strict=True):
            param.grad = mine.grad.full_tensor()
        reference.step()
    for mine, param in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine.full_tensor(), param)


class Container(torch.optim.Optimizer):
    """As torchtitan's: an optimizer per model part, and state dicts by parameters' names."""

    OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)

    def __init__(self, model_parts, optimizer_cls, optimizer_kwargs):
        self.model_parts = model_parts
        self.optimizers = []
        for part in model_parts:
            trained = [param for param in part.parameters() if param.requires_grad]
            self.optimizers.append(optimizer_cls(trained, **optimizer_kwargs))
        everything = [param for part in model_parts for param in part.parameters()]
        super().__init__(everything, optimizer_kwargs)

    def step(self):
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self):
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def state_dict(self):
        result = {}
        for part, optimizer in zip(self.model_parts, self.optimizers, strict=True):
            result |= get_optimizer_state_dict(part, optimizer, options=self.OPTIONS)
        return result

    def load_state_dict(self, state_dict):
        for part, optimizer in zip(self.model_parts, self.optimizers, strict=True):
            set_optimizer_state_dict(
                part, optimizer, optim_state_dict=state_dict, options=self.OPTIONS
            )


@pytest.mark.parametrize("is_resumed", [False, True])
def test_torchtitan(is_resumed, monkeypatch):
    name = "torchtitan.components.optimizer"
    monkeypatch.setitem(sys.modules, name, made_module(name, OptimizersContainer=Container))
    (program,) = programs("torchtitan")
    build = run(program)["build_optimizers"]
    config = SimpleNamespace(lr=1e-2, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)
    model, twin = net(), net()
    # Stages of a pipeline, which keep the names of the whole.
    parts = [torch.nn.ModuleDict({name: model.get_submodule(name)}) for name in ("0", "2")]
    ours = build(parts, config, None)
    theirs = torch.optim.AdamW(
        twin.parameters(), lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1
    )
    train(model, ours, 2)
    if is_resumed:
        saved = ours.state_dict()
        # A new process has no gradients.
        ours.zero_grad()
        ours = build(parts, config, None)
        # Room is made for it first, by a step that counts for nothing.
        ours.state_dict()
        ours.load_state_dict(saved)
    train(model, ours, 2, first=2)
    train(twin, theirs, 4)
    torch.testing.assert_close(weights(model), weights(twin))
    assert all(state["step"] == 4 for each in ours.optimizers for state in each.state.values())


@pytest.mark.timeout(120)
@pytest.mark.filterwarnings("ignore")
def test_lightning(tmp_path):
    lightning = pytest.importorskip("pytorch_lightning")
    quiet = {
        "accelerator": "auto",
        "devices": 1,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
    }
    program = programs("Lightning")[0]
    (made,) = re.findall(r"^trainer = .*\n", program, re.MULTILINE)

    def fit(model_class, batches, epochs, resume=None):
        model = model_class(net())
        trainer = lightning.Trainer(max_epochs=epochs, accumulate_grad_batches=2, **quiet)
        trainer.fit(model, batches, ckpt_path=resume)
        return model, trainer

    batches = torch.utils.data.DataLoader([batch(step) for step in range(4)], batch_size=None)
    made_quiet = made.rstrip(")\n") + ", **quiet)\n"
    names = run(
        program.replace(made, made_quiet),
        lightning=lightning,
        net=net(),
        batches=batches,
        quiet=quiet,
    )
    ours = names["trainer"].model
    (optimizer,) = names["trainer"].optimizers
    assert isinstance(optimizer, stepwell.OffloadAdamW)

    class Theirs(names["Model"]):
        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-3, weight_decay=1e-2)

        def configure_gradient_clipping(self, optimizer, **_):
            torch.nn.utils.clip_grad_norm_(self.parameters(), 1.0)

    theirs, _ = fit(Theirs, batches, epochs=2)
    torch.testing.assert_close(weights(ours), weights(theirs))
    # Resumed in the middle, it is the same run.
    _, first = fit(names["Model"], batches, epochs=1)
    first.save_checkpoint(tmp_path / "half")
    resumed, _ = fit(names["Model"], batches, epochs=2, resume=tmp_path / "half")
    assert torch.equal(bits(weights(resumed)), bits(weights(ours)))


class Hybrid(torch.optim.Optimizer):
    """As Megatron-Core's HybridDeviceOptimizer with everything on the CPU.

    The optimizer steps copies that need no gradient, has groups with keys that it does not know,
    finds its groups replaced before each step, and its state shared and added to after it.
    """

    def __init__(
        self,
        params,
        *,
        offload_fraction,
        cpu_optimizer_cls,
        gpu_optimizer_cls,
        param_update_in_fp32,
        overlap_cpu_optimizer_d2h_h2d=True,
        **kwargs,
    ):
        defaults = {
            "offload_fraction": offload_fraction,
            "cpu_optimizer_cls": cpu_optimizer_cls,
            "param_update_in_fp32": param_update_in_fp32,
            **kwargs,
        }
        super().__init__(params, defaults)
        self.cls, self.is_apart = cpu_optimizer_cls, overlap_cpu_optimizer_d2h_h2d
        self.make()

    def make(self):
        self.copies = {
            param: param.detach().clone().float()
            for group in self.param_groups
            for param in group["params"]
        }
        self.grads = {copy: torch.empty_like(copy) for copy in self.copies.values()}
        groups = [
            {**group, "params": [self.copies[param] for param in group["params"]]}
            for group in self.param_groups
        ]
        if self.is_apart:
            groups = [[{**group, "params": [copy]}] for group in groups for copy in group["params"]]
            self.inner = [self.cls(group) for group in groups]
        else:
            self.inner = [self.cls(groups)]
        for optimizer in self.inner:
            optimizer.register_step_post_hook(self.copy_back)

    def copy_back(self, *_):
        for param, copy in self.copies.items():
            param.data.copy_(copy.data)

    def follow_groups(self):
        (group,) = self.param_groups
        current = {key: value for key, value in group.items() if key != "params"}
        for optimizer in self.inner:
            optimizer.param_groups = [{**each, **current} for each in optimizer.param_groups]

    def step(self):
        self.follow_groups()
        for param, copy in self.copies.items():
            copy.requires_grad = False
            copy.grad = self.grads[copy]
            self.grads[copy].data.copy_(param.grad)
        for optimizer in self.inner:
            optimizer.step(None)
        params = {copy: param for param, copy in self.copies.items()}
        for optimizer in self.inner:
            for copy, state in optimizer.state.items():
                self.state[params[copy]] = state
                state["master_param"] = copy

    def load(self, state):
        """As after loading: optimizers are made anew, and get the state of the outer one."""
        self.make()
        self.follow_groups()
        for optimizer in self.inner:
            assert isinstance(optimizer, self.cls)
            optimizer.state = {
                copy: {
                    name: value.to("cpu") if isinstance(value, torch.Tensor) else value
                    for name, value in state[param].items()
                }
                for param, copy in self.copies.items()
                if any(copy is each for group in optimizer.param_groups for each in group["params"])
            }
        for param, copy in self.copies.items():
            copy.data.copy_(state[param]["master_param"])


@pytest.mark.parametrize("is_apart", [True, False], ids=["overlap", "whole"])
def test_megatron_core(is_apart, monkeypatch):
    name = "megatron.core.optimizer"
    package = made_module(name, CPUAdam=torch.optim.AdamW)
    offloading = made_module(
        f"{name}.cpu_offloading",
        HybridDeviceOptimizer=partial(Hybrid, overlap_cpu_optimizer_d2h_h2d=is_apart),
    )
    core = made_module("megatron.core", optimizer=package)
    for module in (made_module("megatron", core=core), core, package, offloading):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    replace, make = programs("Megatron-Core")
    run(replace)
    options = {"lr": 1e-2, "weight_decay": 0.1, "bias_correction": True, "fused": True}
    results = []
    for cls in (package.CPUAdam, torch.optim.AdamW):
        model = net().bfloat16().float()
        optimizer = Hybrid(
            model.parameters(),
            offload_fraction=1.0,
            cpu_optimizer_cls=cls,
            gpu_optimizer_cls=None,
            param_update_in_fp32=True,
            overlap_cpu_optimizer_d2h_h2d=is_apart,
            **options,
        )
        train(model, optimizer, 2)
        optimizer.param_groups[0]["lr"] = 5e-3
        optimizer.load(optimizer.state)
        train(model, optimizer, 2, first=2)
        results.append(weights(model))
    assert isinstance(optimizer.inner[0], torch.optim.AdamW)
    assert package.CPUAdam is stepwell.AdamW
    torch.testing.assert_close(*results)

    model = net()
    optimizer = run(make, model=model)["optimizer"]
    before = weights(model)
    train(model, optimizer, 2)
    assert not torch.equal(weights(model), before)
    assert {state["exp_avg"].dtype for state in optimizer.state.values()} == {torch.bfloat16}
