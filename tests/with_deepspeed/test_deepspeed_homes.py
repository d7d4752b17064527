"""Where state is, and how accessors of DeepSpeed's get at it: on stand-ins for its classes."""

from types import SimpleNamespace

import pytest
import stepwell
import torch
from stepwell.deepspeed.state import consolidation
from stepwell.deepspeed.state.decoding import DecodingState
from stepwell.deepspeed.state.home import (
    RamHome,
    check_writable,
    home_of,
    loading,
    optimizer_of,
)
from torch.nn import Parameter

NUMEL = 70
PLAIN, CODED = {"moments": "fp32"}, {"moments": "q8"}
SEAMS = {seam.name.removeprefix("state access, "): seam.replace for seam in consolidation.SEAMS}


class Work:
    """What steps a partition in the background."""

    def __init__(self, *, is_swapped=False):
        self.is_swapped, self.called = is_swapped, []

    def finish(self):
        self.called.append("finish")

    def gradient(self, begin, numel):
        return torch.arange(float(begin), float(begin + numel))

    def set_gradient(self, begin, value):
        self.called.append((begin, value))

    def pieces(self, runs):
        return [torch.full((numel,), float(begin)) for begin, numel in runs]


def stepped(kind=stepwell.AdamW, **options):
    """An optimizer of one flat partition, and that."""
    flat = Parameter(torch.linspace(-1.0, 1.0, NUMEL))
    optimizer = kind([flat], **options)
    flat.grad = torch.linspace(1.0, 2.0, NUMEL)
    optimizer.step()
    return optimizer, flat


def homes_of(*fragments):
    return [home_of(each) for each in fragments]


def fragment(start, numel):
    """One of DeepSpeed's."""
    address = SimpleNamespace(start=start, numel=numel)
    return SimpleNamespace(hp_fragment_address=address, hp_fragment="a view")


def linked(optimizer, flat, homes=None):
    """A ZeRO optimizer of two parameters that lie in a partition, and one that does not."""
    params = [Parameter(torch.zeros(3)) for _ in range(3)]
    places = (fragment(0, 3), fragment(3, 3), None)
    zero = SimpleNamespace(
        optimizer=optimizer, single_partition_of_fp32_groups=[flat], bit16_groups=[params]
    )
    if homes is not None:
        zero.stepwell_homes = homes

    def link(self):
        for param, place in zip(params, places, strict=True):
            param._hp_mapping = place

    SEAMS["ZeRO-1/2 links"](link)(zero)
    return params


# ---- a home ----


def test_moments_are_held_by_stepwells_optimizers_and_on_volumes():
    ours, theirs = stepwell.AdamW, torch.optim.AdamW
    for kind, work, is_held in (
        (ours, None, True),
        (ours, Work(), True),
        (theirs, None, False),
        (theirs, Work(), False),
        (theirs, Work(is_swapped=True), True),
    ):
        optimizer, flat = stepped(kind)
        home = RamHome(optimizer, flat, work)
        assert home.holds_moments() is is_held
        with pytest.raises(OSError), loading(optimizer):
            assert not home.holds_moments()
            raise OSError
        assert home.holds_moments() is is_held


def test_what_is_read_is_that_of_the_last_step():
    optimizer, flat = stepped()
    work = Work()
    home = RamHome(optimizer, flat, work)
    assert home.master() is flat
    assert work.called == ["finish"]
    assert home.moment("exp_avg") is optimizer.state[flat]["exp_avg"]
    assert work.called == ["finish"] * 2
    assert home.moment("exp_avg_codes") is None
    # Without work there is nothing to wait for.
    assert RamHome(optimizer, flat).master() is flat


@pytest.mark.parametrize("options", [PLAIN, CODED])
def test_there_are_no_moments_before_the_first_step(options):
    flat = Parameter(torch.zeros(NUMEL))
    assert RamHome(stepwell.AdamW([flat], **options), flat).moment("exp_avg") is None


def test_coded_moments_are_decoded():
    (coded, flat), (plain, other) = stepped(**CODED), stepped(**PLAIN)
    found = RamHome(coded, flat).moment("exp_avg")
    assert (found.dtype, found.requires_grad) == (torch.float32, False)
    torch.testing.assert_close(found, plain.state[other]["exp_avg"], rtol=0.1, atol=0.01)


def test_gradients_and_pieces_are_those_of_what_steps():
    optimizer, flat = stepped()
    work = Work()
    home, alone = RamHome(optimizer, flat, work), RamHome(optimizer, flat)
    assert home.gradient(2, 3).tolist() == [2.0, 3.0, 4.0]
    assert alone.gradient(2, 3) is None
    value = torch.ones(3)
    assert home.set_gradient(2, value) is True
    assert work.called == [(2, value)]
    assert alone.set_gradient(2, value) is False
    assert [each.tolist() for each in home.pieces([(0, 1), (4, 2)])] == [[0.0], [4.0, 4.0]]
    assert alone.pieces([(0, 1)]) is None


def test_parts_of_codes_are_not_written():
    plain, coded, theirs = stepped(**PLAIN)[0], stepped(**CODED)[0], stepped(torch.optim.AdamW)[0]
    for optimizer in (plain, theirs, None):
        check_writable(optimizer, "exp_avg")
    check_writable(coded, "step")
    for name in ("exp_avg", "exp_avg_sq"):
        with pytest.raises(ValueError, match=f"`{name}` is held in codes .moments `q8`."):
            check_writable(coded, name)


# ---- what fragments know ----


@pytest.mark.parametrize("has_pieces", [False, True])
def test_fragments_know_their_home(has_pieces):
    optimizer, flat = stepped()
    home = RamHome(optimizer, flat, Work() if has_pieces else None)
    params = linked(optimizer, flat, [home])
    first, second, other = (param._hp_mapping for param in params)
    assert homes_of(first, second) == [home, home]
    assert other is None
    assert [optimizer_of(param) for param in params] == [optimizer] * 3
    assert optimizer_of(flat) is None
    if has_pieces:
        assert [each.hp_fragment.tolist() for each in (first, second)] == [[0.0] * 3, [3.0] * 3]
    else:
        assert [each.hp_fragment for each in (first, second)] == ["a view"] * 2
    # It is not kept alive.
    del optimizer, home
    for each in (first, second):
        del each.stepwell_home
    assert optimizer_of(params[0]) is None


def test_what_deepspeed_steps_with_stepwells_optimizer_has_a_home_too():
    optimizer, flat = stepped()
    first, second, _ = (param._hp_mapping for param in linked(optimizer, flat))
    assert home_of(first) is home_of(second)
    assert home_of(first).master() is flat


def test_other_optimizers_are_left_alone():
    optimizer, flat = stepped(torch.optim.AdamW)
    params = linked(optimizer, flat)
    assert homes_of(*(param._hp_mapping for param in params[:2])) == [None, None]
    assert optimizer_of(params[0]) is None


# ---- accessors ----


def got(self, key):
    return "DeepSpeed's", key


def test_moments_of_fragments():
    get = SEAMS["ZeRO-1/2 getting"](got)
    optimizer, flat = stepped(**CODED)
    place = linked(optimizer, flat)[1]._hp_mapping
    home = home_of(place)
    assert torch.equal(get(place, "exp_avg"), home.moment("exp_avg")[3:6])
    assert get(place, "step") == got(place, "step")
    with loading(optimizer):
        assert get(place, "exp_avg") == got(place, "exp_avg")
        optimizer.state.clear()
    assert get(fragment(0, 3), "exp_avg") == got(None, "exp_avg")
    with pytest.raises(ValueError, match="there is no `exp_avg_sq` yet"):
        get(place, "exp_avg_sq")


def test_parameters_are_set():
    written = []
    put = SEAMS["ZeRO-1/2 setting"](lambda *args: written.append(args))
    optimizer, flat = stepped(**CODED)
    param = linked(optimizer, flat)[0]
    put(param, 1.0)
    put(param, 2.0, "step")
    assert written == [(param, 1.0, None), (param, 2.0, "step")]
    with pytest.raises(ValueError, match="is held in codes"):
        put(param, 3.0, "exp_avg")
    assert len(written) == 2


class Stage3:
    def __init__(self, optimizer, flats, homes=None):
        self.optimizer, self.fp32_partitioned_groups_flat = optimizer, flats
        self.grad_position = {7: (1, 3, 4)}
        self.asked = []
        if homes is not None:
            self.stepwell_homes = homes

    def get_param_id(self, param):
        return 7

    def got(self, param, release_swap_buffers, optim_state_key=None):
        self.asked.append((param, release_swap_buffers, optim_state_key))
        return f"DeepSpeed's {optim_state_key}", 1


@pytest.mark.parametrize("has_homes", [False, True])
def test_moments_of_partitions_under_zero_3(has_homes):
    get = SEAMS["ZeRO-3"](Stage3.got)
    (optimizer, flat), (_, other) = stepped(), stepped()
    homes = [None, RamHome(optimizer, flat)] if has_homes else None
    zero = Stage3(optimizer, [other, flat], homes)
    found, index = get(zero, "a parameter", True, "exp_avg")
    assert index == 1
    moment = optimizer.state[flat]["exp_avg"]
    assert (found.data_ptr(), found.shape) == (moment[3:].data_ptr(), (4,))
    # For where it is.
    assert zero.asked == [("a parameter", True, None)]
    assert get(zero, "a parameter", False) == ("DeepSpeed's None", 1)
    assert get(zero, "a parameter", True, "step") == ("DeepSpeed's step", 1)
    optimizer.state.clear()
    with pytest.raises(ValueError, match="there is no `exp_avg` yet"):
        get(zero, "a parameter", True, "exp_avg")


def test_moments_under_zero_3_that_are_not_stepwells():
    optimizer, flat = stepped(torch.optim.AdamW)
    zero = Stage3(optimizer, [flat, flat])
    get = SEAMS["ZeRO-3"](Stage3.got)
    assert get(zero, "a parameter", True, "exp_avg") == ("DeepSpeed's exp_avg", 1)


def test_coded_moments_under_zero_3_are_read_and_not_set():
    optimizer, flat = stepped(**CODED)
    get = SEAMS["ZeRO-3"](Stage3.got)
    zero = Stage3(optimizer, [flat, flat])
    found, _ = get(zero, "a parameter", True, "exp_avg_sq")
    assert found.shape == (4,)
    with pytest.raises(ValueError, match="is held in codes"):
        get(zero, "a parameter", False, "exp_avg_sq")


# ---- universal checkpoints ----


@pytest.mark.parametrize("stage", ["ZeRO-1/2", "ZeRO-3"])
def test_universal_checkpoints(stage):
    optimizer, flat = stepped(**CODED)
    zero = SimpleNamespace(optimizer=optimizer, master_weights_and_grads_dtype=torch.float32)
    moments = {name: torch.rand(NUMEL) for name in ("exp_avg", "exp_avg_sq")}

    def load(self, *args, **kwargs):
        # One count, for several partitions.
        self.optimizer.state[flat] = {"step": torch.tensor(5.0), **moments}
        self.loaded = args, kwargs, RamHome(self.optimizer, flat).holds_moments()

    replaced = SEAMS[f"universal checkpoints, {stage}"](load)
    replaced(zero, "a folder", strict=True)
    assert zero.loaded == (("a folder",), {"strict": True}, False)
    home = RamHome(optimizer, flat)
    assert home.holds_moments()
    assert "exp_avg_codes" in optimizer.state[flat]
    assert optimizer.state[flat]["step"] == 5.0
    torch.testing.assert_close(home.moment("exp_avg"), moments["exp_avg"], rtol=0.1, atol=0.02)
    # Such moments hold no more than float32 does.
    zero.master_weights_and_grads_dtype = torch.bfloat16
    with pytest.raises(ValueError, match=r"master of `torch.bfloat16` weights"):
        replaced(zero)
    zero.optimizer = stepped(torch.optim.AdamW)[0]
    replaced(zero)
    assert zero.loaded == ((), {}, False)


def test_a_universal_checkpoint_leaves_partitions_without_state():
    optimizer, flat = stepped()
    other = Parameter(torch.zeros(4))
    optimizer.state[other] = {}
    with loading(optimizer):
        pass
    assert optimizer.state[other] == {}
    assert optimizer.state[flat]["step"] == 1.0


# ---- state that is saved ----


def test_saved_codes_have_their_plain_names():
    optimizer, flat = stepped(**CODED)
    saved = DecodingState(optimizer.state[flat], NUMEL)
    expected = RamHome(optimizer, flat).moment("exp_avg")
    assert torch.equal(saved["exp_avg"], expected)
    assert "exp_avg" not in saved
    for name in ("exp", "exp_avg_scale"):
        with pytest.raises(KeyError, match=name):
            saved[name]
    with pytest.raises(KeyError):
        DecodingState({}, NUMEL)["exp_avg_codes"]
