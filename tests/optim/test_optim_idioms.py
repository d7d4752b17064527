"""What users of torch's optimizers do, under each of ours.

It works as under torch.optim.AdamW, or an error says what to do.
"""

import copy
import logging

import pytest
import stepwell
import torch

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


@pytest.mark.parametrize("cls", OURS)
def test_other_groups_are_refused_with_what_to_do(cls):
    params = [ones(3), ones(3)]
    optimizer = cls([params[0]], lr=0.05)
    group = optimizer.param_groups[0]
    more = [dict(group), dict(group, params=[params[1]])]
    with pytest.raises(ValueError, match=r"`param_groups` has `2` groups, expected 1.*hint: add_"):
        optimizer.__setstate__({"param_groups": more})
    assert optimizer.param_groups == [group]
    with pytest.raises(ValueError, match="`exp_avg`"):
        optimizer.__setstate__({"state": {params[0]: {"step": 1, "exp_avg": torch.ones(2)}}})
    # Other parameters, as torch takes them.
    optimizer.__setstate__({"param_groups": [dict(group, params=[params[1]])]})
    step(optimizer, params)
    assert torch.equal(params[0], torch.ones(3))
    assert not torch.equal(params[1], torch.ones(3))


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


def test_hint_for_a_channels_last_model_can_be_followed():
    model = torch.nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
    with pytest.raises(ValueError, match="contiguous_format") as error:
        stepwell.OffloadAdamW(model)
    hint = str(error.value).split("hint: ")[1].removeprefix("before the optimizer is made, ")
    exec(hint.split(";")[0], {"torch": torch, "model": model})  # noqa: S102
    step(stepwell.OffloadAdamW(model), model.parameters())


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


# ---- what trains nothing is said once ----


def said(caplog, words):
    return sum(words in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("cls", [stepwell.AdamW, stepwell.OffloadAdamW])
def test_a_model_that_is_frozen_is_warned_of(cls, caplog):
    param = torch.nn.Parameter(torch.ones(3), requires_grad=False)
    optimizer = cls([param])
    assert said(caplog, "requires a gradient") == 1
    param.requires_grad_()
    param.grad = torch.ones(3)
    optimizer.step()
    optimizer.zero_grad()
    optimizer.step()
    assert said(caplog, "has ever had a gradient") == 0


@pytest.mark.parametrize("cls", [stepwell.AdamW, stepwell.OffloadAdamW])
def test_steps_without_any_gradient_are_warned_of(cls, caplog):
    optimizer = cls([torch.nn.Parameter(torch.ones(3))])
    for _ in range(3):
        optimizer.step()
    assert said(caplog, "has ever had a gradient") == 1


@pytest.mark.parametrize("cls", [stepwell.AdamW, stepwell.OffloadAdamW])
def test_two_optimizers_that_step_one_parameter_are_warned_of(cls, caplog):
    param = torch.nn.Parameter(torch.ones(3))
    first = cls([param])
    # One that is made anew, as in a notebook.
    second = cls([param])
    for _ in range(2):
        param.grad = torch.ones(3)
        second.step()
    assert said(caplog, "both step") == 0
    for _ in range(2):
        first.step()
        second.step()
    assert said(caplog, "both step") == 1


@pytest.mark.parametrize("cls", [stepwell.AdamW, stepwell.OffloadAdamW])
@pytest.mark.parametrize("options", [{}, {"accumulate": "host"}], ids=["device", "host"])
def test_a_run_of_nothing_but_nan_ends(cls, options):
    if cls is stepwell.AdamW and options:
        pytest.skip("sums are where gradients are")
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 1))
    optimizer = cls(model.named_parameters(), nonfinite="skip", **options)

    def step(factor):
        optimizer.zero_grad()
        (model(torch.ones(1, 3)).sum() * factor).backward()
        optimizer.step()

    for _ in range(49):
        step(float("nan"))
    step(1)
    for _ in range(49):
        step(float("nan"))
    with pytest.raises(ValueError, match=r"`50` steps in a row(.|\n)*parameter `0.weight`"):
        step(float("nan"))
    assert optimizer.skipped_steps == 99


def test_a_run_whose_loss_scale_has_fallen_to_nothing_ends():
    param = torch.nn.Parameter(torch.ones(3))
    optimizer = stepwell.AdamW([("weight", param)])
    scaler = torch.amp.GradScaler("cpu")

    def step():
        scaler.scale(param.sum() * float("inf")).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    for _ in range(49):
        step()
    assert scaler.get_scale() < 1e-9
    with pytest.raises(ValueError, match=r"`50` steps in a row(.|\n)*gradient of .*`weight`"):
        step()


# ---- the line at the start ----


@pytest.fixture(autouse=True)
def no_line_is_told_yet(monkeypatch):
    monkeypatch.setattr("stepwell._notices._num_lines", 0)


def lines(capsys):
    return [line for line in capsys.readouterr().err.splitlines() if line.startswith("stepwell: ")]


def test_a_run_begins_with_a_line_that_says_what_steps(capsys, caplog, monkeypatch):
    model = torch.nn.Linear(300, 40)
    optimizer = stepwell.OffloadAdamW(model, moments="q8")
    (line,) = lines(capsys)
    assert "steps 12,040 parameters on the host, q8 moments, 0.00 GiB of host memory" in line
    model(torch.ones(300)).sum().backward()
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    stepwell.OffloadAdamW(torch.nn.Linear(300, 40)).load_state_dict(saved)
    assert "from step 1 of a state dict; its q8 moments become fp32" in lines(capsys)[1]
    # Of one for each parameter not all are told of.
    for _ in range(12):
        stepwell.OffloadAdamW(torch.nn.Linear(3, 4))
    assert len(lines(capsys)) < 10
    monkeypatch.setattr("stepwell._notices._num_lines", 0)
    # Other ranks say nothing, and so does a program that wants it so.
    monkeypatch.setenv("RANK", "1")
    stepwell.OffloadAdamW(torch.nn.Linear(3, 4))
    monkeypatch.delenv("RANK")
    caplog.set_level(logging.WARNING, logger="stepwell")
    stepwell.OffloadAdamW(torch.nn.Linear(3, 4))
    assert not lines(capsys)
    # One that has a log has it there.
    caplog.set_level(logging.INFO, logger="stepwell")
    stepwell.OffloadAdamW(torch.nn.Linear(3, 4))
    assert "steps 16 parameters on the host" in caplog.text
    assert not lines(capsys)
