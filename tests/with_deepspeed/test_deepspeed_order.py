"""The order of uses of weights under ZeRO-3: what a pass expects of the one before."""

from types import SimpleNamespace

import pytest
import torch
from stepwell.deepspeed.zero.order import Order


def modules(count):
    return [torch.nn.Module() for _ in range(count)]


def use(order, module, numbers=()):
    """A use of a module with such parameters, of one element each."""
    order.note(module, [SimpleNamespace(ds_id=each, ds_numel=1) for each in numbers])


def noted(order, uses):
    """A pass of such modules."""
    order.begin()
    for module, numbers in uses:
        use(order, module, numbers)


def expected(order):
    found = []
    while (ahead := order.next_ahead()) is not None:
        found.append([param.ds_id for param in ahead.params])
    return found


def test_a_pass_is_expected_to_be_as_the_one_before():
    first, second, third = modules(3)
    order = Order(0)
    uses = [(first, [0]), (second, [1, 2]), (third, [3])]
    order.begin()
    assert expected(order) == []
    noted(order, uses)
    assert expected(order) == []
    for _ in range(2):
        order.begin()
        assert expected(order) == [[0], [1, 2], [3]]
        assert expected(order) == []
        for module, _ in uses:
            use(order, module)
        assert expected(order) == []


def test_what_is_used_is_no_longer_ahead():
    first, second, third = modules(3)
    order = Order(0)
    noted(order, [(first, [0]), (second, [1]), (third, [2])])
    order.begin()
    use(order, first)
    assert [param.ds_id for param in order.next_ahead().params] == [1]
    order.put_back()
    assert [param.ds_id for param in order.next_ahead().params] == [1]
    # It is given once, also where its use begins.
    use(order, second)
    assert expected(order) == [[2]]


@pytest.mark.parametrize("other", [0, 2])
def test_nothing_is_expected_behind_another_use(other):
    made = modules(3)
    order = Order(10)
    noted(order, [(made[0], [0]), (made[1], [1]), (made[0], [0])])
    order.begin()
    use(order, made[0], [0])
    assert order.is_used_soon(0)
    # Also where the pass goes on as it was.
    for index in (other, 0):
        use(order, made[index], [index])
        assert expected(order) == []
        assert not order.is_used_soon(0)
    # It is what is expected next.
    order.begin()
    assert expected(order) == [[0], [other], [0]]


def test_uses_before_the_first_pass_are_one_of_training():
    (module,) = modules(1)
    order = Order(0)
    use(order, module, [3])
    assert expected(order) == []
    assert not order.is_used_soon(3)
    with torch.no_grad():
        order.begin()
        assert expected(order) == []
    order.begin()
    assert expected(order) == [[3]]


@pytest.mark.parametrize("length", [1, 3])
def test_a_pass_of_another_length_is_the_next_order(length):
    first, second = modules(2)
    order = Order(10)
    noted(order, [(first, [0]), (second, [1])])
    noted(order, [(first, [0]), (second, [1]), (first, [0])][:length])
    assert expected(order) == ([] if length == 3 else [[1]])
    order.begin()
    assert expected(order) == [[0], [1], [0]][:length]
    use(order, first)
    assert order.is_used_soon(0) is (length == 3)


def test_a_pass_without_uses_changes_no_order():
    (module,) = modules(1)
    order = Order(0)
    noted(order, [(module, [0])])
    for _ in range(3):
        order.begin()
        assert expected(order) == [[0]]


def test_training_and_evaluation_have_orders_of_their_own():
    first, second = modules(2)
    order = Order(10)
    noted(order, [(first, [0]), (second, [1]), (first, [0])])
    with torch.no_grad():
        noted(order, [(second, [1])])
        order.begin()
        assert expected(order) == [[1]]
        assert not order.is_used_soon(0)
        use(order, second)
    order.begin()
    assert order.is_used_soon(0)
    assert expected(order) == [[0], [1], [0]]


@pytest.mark.parametrize(("reuse", "soon"), [(0, []), (1, [1]), (2, [1, 2]), (3, [0, 1, 2])])
def test_how_soon_is_soon(reuse, soon):
    first, second, third = modules(3)
    order = Order(reuse)
    uses = [(first, [0]), (second, [1]), (third, [2]), (first, [0])]
    noted(order, uses)
    for _ in range(2):
        order.begin()
        use(order, first)
        # Twice: it is kept for a position.
        assert [each for each in range(4) if order.is_used_soon(each)] == soon
        assert [each for each in range(4) if order.is_used_soon(each)] == soon
        for module, _ in uses[1:]:
            use(order, module)
        assert not any(map(order.is_used_soon, range(4)))


def test_what_was_given_ahead_is_used_soon():
    first, second = modules(2)
    order = Order(0)
    noted(order, [(first, [0]), (second, [1]), (first, [0])])
    order.begin()
    use(order, first)
    for _ in range(2):
        order.next_ahead()
    assert order.is_used_soon(0)
