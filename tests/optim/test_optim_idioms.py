"""What users of torch's optimizers do, under each of ours.

It works as under torch.optim.AdamW, or an error says what to do.
"""

import copy
import logging
import sys

import pytest
import stepwell
import torch
from insides import twins_of

OURS = [stepwell.AdamW, stepwell.OffloadAdamW]


def ones(*shape, **options):
    return torch.nn.Parameter(
        torch.ones(*shape, device="cpu", **{"dtype": torch.float32, **options})
    )


def finish(optimizer):
    if isinstance(optimizer, stepwell.OffloadAdamW):
        optimizer.synchronize()


def step(optimizer, params, value=1.0):
    for param in params:
        param.grad = torch.full_like(param, value)
    optimizer.step()
    finish(optimizer)


@pytest.fixture
def default_dtype():
    before = torch.get_default_dtype()
    yield torch.set_default_dtype
    torch.set_default_dtype(before)


@pytest.mark.parametrize("cls", OURS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_step_counts_in_float32_whatever_the_default_is(cls, dtype, default_dtype):
    default_dtype(dtype)
    param = ones(8)
    optimizer = cls([param])
    for _ in range(260):
        step(optimizer, [param])
    resumed = cls([param])
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for each in (optimizer, resumed):
        counter = each.state[param]["step"]
        assert (counter.item(), counter.dtype) == (260.0, torch.float32)


@pytest.mark.parametrize("cls", OURS)
@pytest.mark.parametrize("moments", ["fp32", "q8"])
def test_default_device_is_not_followed(cls, moments):
    param = ones(64)
    with torch.device("meta"):
        optimizer = cls([param], moments=moments)
        step(optimizer, [param])
        decoded = optimizer.decoded_state_dict()["state"][0]
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        step(optimizer, [param])
    tensors = [*optimizer.state[param].values(), decoded["exp_avg"]]
    assert all(tensor.is_cpu for tensor in tensors)
    assert optimizer.state[param]["step"] == 2


@pytest.mark.parametrize("cls", OURS)
def test_state_may_be_looked_at_before_the_first_step(cls):
    param = ones(4)
    optimizer = cls([param])
    assert optimizer.state[param] == {}
    step(optimizer, [param])
    assert optimizer.state[param]["step"] == 1


@pytest.mark.parametrize("cls", OURS)
def test_steps_go_on_from_state_that_was_only_made(cls):
    # As torch.distributed.checkpoint makes it, by a step at lr 0.
    param = ones(4)
    optimizer = cls([param], lr=0.0)
    step(optimizer, [param], value=0.0)
    assert optimizer.state[param]["step"] == 0
    optimizer.param_groups[0]["lr"] = 0.1
    step(optimizer, [param])
    assert optimizer.state[param]["step"] == 1


@pytest.mark.parametrize("cls", OURS)
def test_state_made_in_inference_mode_can_be_stepped_outside(cls):
    param = ones(4)
    optimizer = cls([param])
    with torch.inference_mode():
        step(optimizer, [param])
        optimizer.load_state_dict(optimizer.state_dict())
    step(optimizer, [param])
    assert optimizer.state[param]["step"] == 2


@pytest.mark.parametrize("cls", OURS)
@pytest.mark.parametrize("value", [1e18, 1e20, 3e38])
def test_gradients_whose_squares_overflow_are_finite(cls, value):
    params = [ones(4), ones(4)]
    optimizer = cls(params, lr=0.1, weight_decay=0.0, nonfinite="raise")
    params[1].grad = torch.ones(4)
    params[0].grad = torch.full((4,), value)
    optimizer.step()
    finish(optimizer)
    if cls is stepwell.OffloadAdamW:
        assert optimizer.grad_norm == pytest.approx(2.0 * value)
    assert params[1][0].item() == pytest.approx(0.9)


def test_a_norm_beyond_float32_is_clipped_by():
    param = ones(4)
    optimizer = stepwell.OffloadAdamW([param], clip_norm=1.0)
    step(optimizer, [param], 1e20)
    assert optimizer.state[param]["exp_avg"][0].item() == pytest.approx(0.1 * 0.5)


@pytest.mark.parametrize("cls", OURS)
def test_skipped_steps_are_warned_of_when_their_number_doubles(cls, caplog):
    param = ones(4)
    optimizer = cls([param], nonfinite="skip")
    with caplog.at_level(logging.WARNING, "stepwell"):
        for _ in range(9):
            step(optimizer, [param], float("nan"))
    assert [record.args[1] for record in caplog.records] == [1, 2, 4, 8]
    assert logging.getLogger("stepwell").handlers == []


@pytest.mark.parametrize("cls", OURS)
def test_dummy_step_makes_state_under_propagate(cls):
    param = ones(4)
    optimizer = cls([param], lr=0.0, nonfinite="propagate")
    step(optimizer, [param], 0.0)
    assert optimizer.state[param]["step"] == 0


@pytest.mark.parametrize("cls", OURS)
@pytest.mark.parametrize("value", [1.0, float("nan")], ids=str)
@pytest.mark.parametrize("nonfinite", ["skip", "propagate"])
def test_first_step_at_lr_0_counts_where_gradients_are_not_0(cls, nonfinite, value):
    param = ones(4)
    optimizer = cls([param], lr=0.0, nonfinite=nonfinite)
    step(optimizer, [param], value)
    if nonfinite == "skip" and value != 1.0:
        assert (optimizer.skipped_steps, len(optimizer.state)) == (1, 0)
        return
    assert optimizer.state[param]["step"] == 1
    assert torch.equal(param.isnan(), torch.full_like(param, value).isnan())
    expected = torch.full_like(param, value) * 0.1
    torch.testing.assert_close(optimizer.state[param]["exp_avg"], expected.detach(), equal_nan=True)


@pytest.mark.parametrize("accumulation_steps", [None, 1])
@pytest.mark.parametrize("nonfinite", ["skip", "raise"])
def test_gradient_of_a_step_not_taken_is_not_stepped_later(nonfinite, accumulation_steps):
    params, expected = [ones(64), ones(64)], [ones(64), ones(64)]
    options = {"lr": 0.1, "nonfinite": nonfinite, "accumulation_steps": accumulation_steps}
    optimizer = stepwell.OffloadAdamW(params, **options)
    other = stepwell.AdamW(expected, lr=0.1)
    # Of the step that is not taken, all gradients have come to the host.
    (params[0] * float("nan") + params[1] * 100.0).sum().backward()
    if nonfinite == "raise":
        with pytest.raises(ValueError, match="nan"):
            optimizer.step()
    else:
        optimizer.step()
    optimizer.zero_grad()
    for used in ([0], [1], [0, 1]):
        sum((params[number] * 2.0).sum() for number in used).backward()
        sum((expected[number] * 2.0).sum() for number in used).backward()
        for each in (optimizer, other):
            each.step()
            each.zero_grad()
    finish(optimizer)
    assert all(map(torch.equal, params, expected))
    steps = [optimizer.state[param]["step"].item() for param in params]
    assert steps == [2.0, 2.0]


@pytest.mark.parametrize("cls", OURS)
@pytest.mark.parametrize(
    "option",
    [{"betas": 0.9}, {"lr": None}, {"lr": "1e-3"}, {"weight_decay": None}, {"seed": "x"}],
    ids=str,
)
def test_bad_group_leaves_the_optimizer_as_it_was(cls, option):
    first, second = ones(4), ones(4)
    optimizer = cls([first])
    with pytest.raises(ValueError, match=next(iter(option))):
        optimizer.add_param_group({"params": [second], **option})
    assert len(optimizer.param_groups) == 1
    step(optimizer, [first])


def test_no_memory_for_a_group_leaves_the_optimizer_as_it_was(monkeypatch):
    from stepwell.store import twins

    first, second = ones(4), ones(4)
    optimizer = stepwell.OffloadAdamW([first])

    class Core:
        @staticmethod
        def Buffer(_):  # noqa: N802
            raise OSError("no memory")

    with monkeypatch.context() as patched:
        patched.setattr(twins, "_core", Core)
        with pytest.raises(OSError, match="no memory"):
            optimizer.add_param_group({"params": [second]})
    step(optimizer, [first, second])
    assert torch.equal(second, torch.ones(4))
    optimizer.add_param_group({"params": [second]})
    step(optimizer, [first, second])
    assert not torch.equal(second, torch.ones(4))


@pytest.mark.parametrize("cls", OURS)
@pytest.mark.parametrize("edit", ["thaw", "replace", "append"])
def test_parameters_that_come_later(cls, edit):
    def run(cls):
        first, second, third = ones(4), ones(4), ones(4)
        if edit == "thaw":
            second.requires_grad_(False)
        optimizer = cls([first, second], lr=0.1)
        step(optimizer, [first])
        if edit == "thaw":
            second.requires_grad_(True)
        elif edit == "replace":
            optimizer.param_groups[0]["params"][1] = second = third
        else:
            second = third
            optimizer.param_groups.append({**optimizer.param_groups[0], "params": [third]})
        step(optimizer, [first, second])
        step(optimizer, [first, second])
        return torch.stack([first, second]).detach()

    torch.testing.assert_close(run(cls), run(torch.optim.AdamW))


@pytest.mark.parametrize("accumulate", ["device", "host"])
def test_host_memory_of_parameters_that_are_replaced_is_freed(accumulate):
    first, second = ones(4), ones(4)
    optimizer = stepwell.OffloadAdamW(
        [first, second], accumulate=accumulate, host_bytes_max=1 << 28
    )

    def counts(buffers):
        return [sys.getrefcount(buffer) for buffer in buffers]

    unheld = counts([stepwell._core.Buffer(64)])
    for _ in range(3):
        buffers = list(
            {id(b): b for p in (first, second) for b in twins_of(optimizer)[p].buffers}.values()
        )
        step(optimizer, [first, second])
        assert unheld != counts(buffers)
        optimizer.param_groups[0]["params"] = [second]
        step(optimizer, [second])
        assert first not in twins_of(optimizer)
        first, second = ones(4), ones(4)
        optimizer.param_groups[0]["params"] = [first, second]
        step(optimizer, [first, second])
        assert counts(buffers) == unheld * len(buffers)
        assert len(twins_of(optimizer).buffers) == 2
        assert len(twins_of(optimizer)) == 2


@pytest.mark.parametrize("cls", OURS)
def test_parameter_that_comes_back_goes_on(cls):
    def run(cls, dtype=torch.float32):
        first, second = (torch.nn.Parameter(torch.ones(4, dtype=dtype)) for _ in range(2))
        optimizer = cls([first, second], lr=0.1)
        for params in [[first, second], [second], [first, second], [second], [first, second]]:
            optimizer.param_groups[0]["params"] = params
            with torch.no_grad():
                # While it is away, other code writes it.
                first.mul_(1.5) if params == [second] else None
            step(optimizer, params, 0.3)
        return torch.stack([first, second]).detach()

    torch.testing.assert_close(run(cls), run(torch.optim.AdamW))
    assert torch.equal(run(cls, torch.bfloat16), run(stepwell.AdamW, torch.bfloat16))


@pytest.mark.parametrize("cls", OURS)
@pytest.mark.parametrize("where", [{"device": "meta"}, {"dtype": torch.float64}], ids=str)
def test_resuming_with_a_parameter_that_is_frozen_now(cls, where):
    params = [ones(4), ones(4)]
    optimizer = cls(params)
    step(optimizer, params)
    saved = copy.deepcopy(optimizer.state_dict())
    frozen, live = torch.nn.Parameter(torch.ones(4, **where), requires_grad=False), ones(4)
    resumed = cls([frozen, live])
    resumed.load_state_dict(saved)
    assert torch.equal(resumed.state[frozen]["exp_avg"], saved["state"][0]["exp_avg"])
    step(resumed, [live])
    assert resumed.state[live]["step"] == 2


@pytest.mark.parametrize("cls", OURS)
@pytest.mark.parametrize("edit", ["seed", "swap", "move", "drop"])
def test_resumed_run_rounds_alike_after_an_edit(cls, edit):
    def grads(params, number):
        torch.manual_seed(number)
        for param in params:
            if param.grad is None:
                param.grad = torch.zeros_like(param)
            param.grad.copy_(torch.randn_like(param))

    params = [torch.nn.Parameter(torch.randn(512)) for _ in range(3)]
    optimizer = cls([{"params": params[:2]}, {"params": params[2:]}], lr=1e-2, moments="q8")
    grads(params, 1)
    optimizer.step()
    first, second = optimizer.param_groups
    if edit == "seed":
        first["seed"] = second["seed"] = 7
    elif edit == "swap":
        first["params"], second["params"] = second["params"], first["params"]
    elif edit == "move":
        second["params"] = [first["params"].pop(), *second["params"]]
    else:
        del optimizer.state[params[0]]
        first["params"] = [params[1]]
    order = [param for group in optimizer.param_groups for param in group["params"]]
    grads(order, 2)
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    copies = {param: torch.nn.Parameter(param.detach().clone()) for param in order}
    groups = [
        {"params": [copies[param] for param in group["params"]]} for group in optimizer.param_groups
    ]
    resumed = cls(groups, lr=1e-2, moments="q8")
    resumed.load_state_dict(saved)
    for number in (3, 4):
        grads(order, number)
        optimizer.step()
        grads(copies.values(), number)
        resumed.step()
    for each in (optimizer, resumed):
        finish(each)
    assert all(torch.equal(param, other) for param, other in copies.items())


def test_memory_that_was_freed_is_shared_with_nobody():
    param, frozen = ones(64), ones(64)
    optimizer = stepwell.AdamW([param, frozen])
    step(optimizer, [param, frozen])
    step(optimizer, [param, frozen])
    # As `layer.requires_grad_(False).to(torch.bfloat16)` does. What it gives back becomes a
    # gradient here for certain; the allocator does that by chance.
    given_back = frozen.data
    frozen.requires_grad_(False)
    frozen.grad = None
    frozen.data = frozen.data.bfloat16()
    param.grad = given_back.fill_(1.0)
    optimizer.step()
    assert optimizer.state[param]["step"] == 3
    # Memory that is somebody's is still seen.
    param.grad = optimizer.state[param]["exp_avg"]
    with pytest.raises(ValueError, match="shares memory"):
        optimizer.step()


@pytest.mark.parametrize("cls", OURS)
def test_weight_norm_after_the_first_step(cls):
    layer = torch.nn.Linear(5, 3, bias=False)
    old = layer.weight
    optimizer = cls([old], lr=1e-2)
    layer(torch.ones(1, 5)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    torch.nn.utils.parametrizations.weight_norm(layer)
    with pytest.raises(ValueError, match=r"shares memory(.|\n)*remove that from .*param_groups"):
        optimizer.add_param_group({"params": list(layer.parameters())})
    # As the hint says.
    optimizer.param_groups[0]["params"].clear()
    optimizer.add_param_group({"params": list(layer.parameters())})
    before = [param.detach().clone() for param in layer.parameters()]
    layer(torch.ones(1, 5)).square().sum().backward()
    optimizer.step()
    assert all(
        not torch.equal(param.detach(), other)
        for param, other in zip(layer.parameters(), before, strict=True)
    )


def test_layers_frozen_and_cast_while_training():
    def train(cls):
        torch.manual_seed(0)
        net = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(6)])
        optimizer = cls(net.parameters(), lr=1e-3)
        inputs = torch.randn(4, 64)
        for number in range(7):
            if number == 2:
                net[:3].requires_grad_(False).to(torch.bfloat16)
            hidden = net[:3](inputs.to(net[0].weight.dtype)).float()
            net[3:](hidden).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [param.detach() for param in net[3:].parameters()]

    torch.testing.assert_close(train(stepwell.AdamW), train(torch.optim.AdamW))


@pytest.mark.parametrize("cls", OURS)
@pytest.mark.parametrize("how", ["clear", "del", "pop"])
def test_state_that_was_deleted_begins_anew(cls, how):
    def run(cls):
        params = [ones(64), ones(64)]
        optimizer = cls(params, lr=0.1)
        for number in range(30):
            if number % 3 == 2:
                if how == "clear":
                    optimizer.state.clear()
                elif how == "del":
                    del optimizer.state[params[0]]
                else:
                    optimizer.state.pop(params[1])
            step(optimizer, params, 1.0 + number)
        return [optimizer.state[param]["step"].item() for param in params], params

    (steps, params), (expected_steps, expected) = run(cls), run(torch.optim.AdamW)
    assert steps == expected_steps
    torch.testing.assert_close(params, expected)


@pytest.mark.parametrize("cls", OURS)
def test_parameter_removed_from_its_group_is_left_alone(cls):
    params = [ones(64), ones(64)]
    optimizer = cls(params, lr=0.1)
    step(optimizer, params)
    del optimizer.param_groups[0]["params"][0]
    before = params[0].detach().clone()
    expected = [param.detach().clone().requires_grad_() for param in params]
    other = torch.optim.AdamW(expected, lr=0.1)
    other.load_state_dict(
        {
            "state": {
                number: copy.deepcopy(dict(optimizer.state[param]))
                for number, param in enumerate(params)
            },
            "param_groups": other.state_dict()["param_groups"],
        }
    )
    for value in (2.0, 3.0):
        step(optimizer, params, value)
        expected[1].grad = torch.full_like(params[1], value)
        other.step()
    assert torch.equal(params[0], before)
    torch.testing.assert_close(params[1].detach(), expected[1].detach())


@pytest.mark.parametrize("cls", OURS)
def test_optimizer_in_backward(cls):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
    expected = copy.deepcopy(net)
    options = {"threads": 1} if cls is stepwell.OffloadAdamW else {}
    optimizers = {param: cls([param], lr=1e-2, **options) for param in net.parameters()}

    def update(param):
        optimizers[param].step()
        optimizers[param].zero_grad()

    for param in net.parameters():
        param.register_post_accumulate_grad_hook(update)
    other = stepwell.AdamW(expected.parameters(), lr=1e-2)
    for number in range(4):
        inputs = torch.full((2, 8), 1.0 + number)
        net(inputs).square().sum().backward()
        expected(inputs).square().sum().backward()
        other.step()
        other.zero_grad()
    for optimizer in optimizers.values():
        finish(optimizer)
    assert all(map(torch.equal, net.parameters(), expected.parameters()))


def channels_last_losses(cls, net, prepare):
    inputs = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    inputs = inputs.to(memory_format=torch.channels_last)
    prepare(net)
    optimizer = cls(net.parameters(), lr=1e-2)
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = net(inputs).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def conv():
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Conv2d(8, 4, 3))
    return net.to(memory_format=torch.channels_last)


def follow(error, model, parameter=None):
    """Does what the hint of `error` says first."""
    hint = str(error.value).split("hint: ")[1].removeprefix("before the optimizer is made, ")
    exec(hint.split(";")[0], {"torch": torch, "model": model, "parameter": parameter})  # noqa: S102


def test_channels_last_model_trains():
    expected = channels_last_losses(torch.optim.AdamW, conv(), lambda _: None)
    found = channels_last_losses(stepwell.AdamW, conv(), lambda _: None)
    torch.testing.assert_close(found, expected)


def test_hint_for_a_channels_last_model_can_be_followed():
    net = conv()
    with pytest.raises(ValueError, match="contiguous_format") as error:
        stepwell.OffloadAdamW(net)
    expected = channels_last_losses(torch.optim.AdamW, conv(), lambda _: None)
    found = channels_last_losses(stepwell.OffloadAdamW, net, lambda net: follow(error, net))
    torch.testing.assert_close(found, expected)


def test_hint_for_a_model_made_channels_last_later_can_be_followed():
    net, other = conv(), conv()
    net.to(memory_format=torch.contiguous_format)
    optimizer = stepwell.OffloadAdamW(net, lr=0.1)
    expected = stepwell.AdamW(other.parameters(), lr=0.1)
    step(optimizer, net.parameters())
    step(expected, other.parameters())
    net.to(memory_format=torch.channels_last)
    with pytest.raises(ValueError, match="contiguous_format") as error:
        step(optimizer, net.parameters())
    follow(error, net)
    step(optimizer, net.parameters(), 2.0)
    step(expected, other.parameters(), 2.0)
    assert all(map(torch.equal, net.parameters(), other.parameters()))


def test_hint_for_a_transposed_parameter_can_be_followed():
    param = torch.nn.Parameter(torch.arange(6.0).view(2, 3).t())
    with pytest.raises(ValueError, match="not contiguous") as error:
        stepwell.OffloadAdamW([param])
    follow(error, None, param)
    step(stepwell.OffloadAdamW([param], lr=0.1), [param])


# Of torch: slower, it says.
@pytest.mark.filterwarnings("ignore:grad and param do not obey")
@pytest.mark.parametrize("cls", OURS)
@pytest.mark.parametrize("accumulation_steps", [None, 1])
def test_channels_last_gradient_of_a_contiguous_parameter(cls, accumulation_steps):
    is_offloaded = cls is stepwell.OffloadAdamW
    param, other = ones(4, 3, 2, 2), ones(4, 3, 2, 2)
    options = {"accumulation_steps": accumulation_steps} if is_offloaded else {}
    optimizer = cls([param], lr=0.1, **options)
    expected = cls([other], lr=0.1)
    for number in range(3):
        torch.manual_seed(number)
        other.grad = torch.randn(4, 3, 2, 2)
        grad = other.grad.to(memory_format=torch.channels_last)
        assert not grad.is_contiguous()
        if accumulation_steps is None:
            param.grad = grad
        else:
            param.grad = torch.zeros_like(grad)
            (param * grad).sum().backward()
            assert not param.grad.is_contiguous()
        optimizer.step()
        expected.step()
    finish(optimizer)
    finish(expected)
    assert torch.equal(param, other)


def test_state_that_is_not_dense_is_stepped():
    param = ones(64, 64)
    optimizer = stepwell.OffloadAdamW([param])
    step(optimizer, [param])
    state = optimizer.state[param]
    state["exp_avg"] = state["exp_avg"].t()
    before = state["exp_avg"].clone()
    step(optimizer, [param], 3.0)
    assert not torch.equal(before, optimizer.state[param]["exp_avg"])


# Dynamo reads the gradients of what is no leaf.
@pytest.mark.filterwarnings("ignore:The .grad attribute")
@pytest.mark.parametrize("cls", OURS)
def test_compiled_function_that_steps(cls):
    def losses(compiled):
        torch.manual_seed(0)
        net = torch.nn.Linear(4, 4)
        optimizer = cls(net.parameters(), lr=0.1)

        def train(x):
            loss = net(x).square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        run = torch.compile(train, backend="eager") if compiled else train
        return [run(torch.ones(2, 4)).item() for _ in range(4)]

    assert losses(compiled=True) == losses(compiled=False)
