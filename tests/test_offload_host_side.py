"""What stands in host memory for parameters: what is admitted, with which state, what has gone."""

import pytest
import torch
from stepwell import Deferred, _state
from stepwell.offload.deferred import Extents, memory_of
from stepwell.offload.host_side import HostSide
from torch.nn import Parameter


@pytest.fixture
def host():
    return HostSide("fp32", None)


def parameter(value=1.0):
    # bfloat16: its state has fingerprints.
    return Parameter(torch.full((300,), value, dtype=torch.bfloat16))


def written_by_a_step(host, param, value):
    """The host side as a step leaves it."""
    host.twins.weight(param).data.fill_(value)
    host.fingerprints.mark_outdated(param, None)
    host.fingerprints.mark_verified([param])


def fingerprints_of(param):
    state = _state.new(param.detach(), "fp32")
    _state.take_fingerprints(param.detach(), state, "fp32")
    return state["fingerprints"]


def test_state_is_set_aside_until_the_optimizer_has_it(host):
    param, other = parameter(), parameter()
    host.admit([param, other], {})
    state = host.fresh_state(param)
    assert state.keys() == _state.new(param, "fp32").keys()
    assert host.fresh_state(param) is state
    assert host.fresh_state(parameter()) is None
    host.drop_fresh([param])
    assert host.fresh_state(param) is None
    assert host.fresh_state(other) is not None
    assert not host.fingerprints.is_unverified(param)


def test_a_parameter_that_comes_with_state_is_verified(host):
    param, other = parameter(), parameter()
    host.admit([param, other], {param: _state.new(param, "fp32"), other: {}})
    assert host.fresh_state(param) is None
    assert host.fingerprints.is_unverified(param)
    assert host.fresh_state(other) is not None
    assert not host.fingerprints.is_unverified(other)


def test_what_cannot_be_admitted_leaves_nothing(host, monkeypatch):
    first, second = parameter(), parameter()
    host.admit([first], {})
    nbytes = host.twins.total_nbytes
    monkeypatch.setattr(_state, "new", lambda *_: (_ for _ in ()).throw(OSError("no memory")))
    with pytest.raises(OSError, match="no memory"):
        host.admit([second], {})
    assert second not in host.twins
    assert host.twins.total_nbytes == nbytes
    assert host.fresh_state(first) is not None


def test_what_has_gone_leaves_its_state_as_good_as_it_was(host):
    param, other = parameter(), parameter()
    host.admit([param, other], {})
    state = host.fresh_state(param)
    host.drop_fresh([param])
    written_by_a_step(host, param, 2.0)
    host.let_go(iter([param]), {param: state})
    assert torch.equal(state["fingerprints"], fingerprints_of(parameter(2.0)))
    assert param not in host.twins
    assert other in host.twins
    host.let_go([other], {})
    assert host.fresh_state(other) is None
    assert host.twins.total_nbytes == 0


def test_what_has_gone_is_forgotten(host):
    param = parameter()
    host.admit([param], {param: _state.new(param, "fp32")})
    host.let_go([param], {})
    assert not host.fingerprints.is_unverified(param)
    assert host.fingerprints.outdated([param], {}) == []


def test_fingerprints_are_taken_where_there_is_state(host):
    param, other = parameter(), parameter()
    host.admit([param, other], {})
    state = host.fresh_state(param)
    for each in (param, other):
        written_by_a_step(host, each, 3.0)
    # The user has deleted that of the other.
    host.take_fingerprints([param, other], {param: state})
    assert torch.equal(state["fingerprints"], fingerprints_of(parameter(3.0)))
    assert host.fingerprints.outdated([param, other], {}) == []


def test_only_what_was_written_is_read_again(host):
    param, other = parameter(), parameter()
    host.admit([param, other], {})
    host.reread([param, other], {})
    host.fingerprints.mark_verified([param, other])
    state = host.fresh_state(param)
    written_by_a_step(host, param, 5.0)
    with torch.no_grad():
        param.fill_(4.0)
    host.reread([param], {param: state})
    # Of what the step has left: the next one sees where others have written.
    assert torch.equal(state["fingerprints"], fingerprints_of(parameter(5.0)))
    assert host.fingerprints.is_unverified(param)
    assert not host.fingerprints.is_unverified(other)
    assert torch.equal(host.twins.weight(param), param.detach())


def test_loaded_state_is_verified_and_not_set_aside(host):
    param = parameter()
    host.admit([param], {})
    host.note_load(has_state=False)
    assert host.fresh_state(param) is not None
    assert host.fingerprints.is_unverified(param)
    host.note_load(has_state=True)
    assert host.fresh_state(param) is None


# ---- what is refused ----


def taken(param):
    """Bytes that a parameter takes, its state among them."""
    return _state.nbytes(param, "fp32") + 2 * 640


def announce(bytes_max, *, held=(), states=None):
    """Announces another parameter beside those that are held."""
    host = HostSide("fp32", bytes_max)
    host.admit(held, states or {})
    new = parameter()
    host.announce([new], states or {})


def test_no_more_is_announced_than_is_left():
    param = parameter()
    nbytes = taken(param)
    announce(nbytes)
    announce(2 * nbytes, held=[param])
    # State that the optimizer has counts as well as that which is set aside.
    announce(2 * nbytes, held=[param], states={param: _state.new(param, "fp32")})
    announce(None, held=[param])
    for left, options in (
        (nbytes - 1, {}),
        (2 * nbytes - 1, {"held": [param]}),
        (2 * nbytes - 1, {"held": [param], "states": {param: _state.new(param, "fp32")}}),
    ):
        with pytest.raises(ValueError, match=f"`{nbytes - 1}` are left of `host_bytes_max`"):
            announce(left, **options)


def test_deferred_updates_of_all_are_named_where_a_parameter_is_added():
    large = Parameter(torch.zeros(3000, dtype=torch.bfloat16))
    host = HostSide("fp32", 20 * 3000, Deferred(interval=4))
    host.admit([large], {})
    new = parameter()
    waiting = memory_of(Extents.of([large, new]), Deferred(interval=4)).pinned
    alone = memory_of(Extents.of([new]), Deferred(interval=4)).pinned
    assert waiting > 2 * alone
    with pytest.raises(ValueError, match="are left of `host_bytes_max`") as refused:
        host.announce([new], {})
    said = f"300 parameters and deferred updates of all (`{waiting}` bytes) take "
    assert str(refused.value).startswith(said)
    assert "hint: moments='q8'" in str(refused.value)
    assert "a smaller interval" in str(refused.value)


def test_a_parameter_that_comes_with_its_state_takes_no_other():
    param = parameter()
    states = {param: _state.new(param, "fp32")}
    host = HostSide("fp32", taken(param))
    host.announce([param], states)
    host = HostSide("fp32", taken(param) - 1)
    with pytest.raises(ValueError, match="are left of `host_bytes_max`"):
        host.announce([param], states)


def test_parameters_that_share_memory_are_refused(host):
    memory = torch.zeros(600, dtype=torch.bfloat16)
    param, other = Parameter(memory[:300]), Parameter(memory[299:])
    labels = {param: "the first", other: "the other"}
    host.check([param], labels)
    host.admit([param], {})
    with pytest.raises(ValueError, match="the other shares memory with the first"):
        host.check([other], labels)
    # What is in no group any more is not looked at.
    host.check([other], {other: "the other"})


def test_parameters_are_on_one_device_that_works(host):
    param = parameter()
    host.admit([param], {})
    assert host.device == torch.device("cpu")
    elsewhere = Parameter(torch.empty(3, device="meta"))
    with pytest.raises(ValueError, match="meta"):
        host.check([elsewhere], {param: "the first", elsewhere: "the other"})
