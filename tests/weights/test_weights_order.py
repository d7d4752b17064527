"""The order of uses of weights: what a pass expects of the one before."""

import pytest
import torch
from stepwell.weights.order import Order


class Weight:
    """Of one element."""

    numel = 1


WEIGHTS = [Weight() for _ in range(4)]


def modules(count):
    return [torch.nn.Module() for _ in range(count)]


def use(order, module, numbers=()):
    """A use of a module with such weights."""
    order.note(module, [WEIGHTS[each] for each in numbers])


def numbered(weights):
    return sorted(map(WEIGHTS.index, weights))


def noted(order, uses):
    """A pass of such modules."""
    order.begin()
    for module, numbers in uses:
        use(order, module, numbers)


def expected(order):
    found = []
    while (ahead := order.next_ahead()) is not None:
        found.append(numbered(ahead.weights))
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
    assert numbered(order.next_ahead().weights) == [1]
    order.put_back()
    assert numbered(order.next_ahead().weights) == [1]
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
    assert WEIGHTS[0] in order.used_soon()
    # Also where the pass goes on as it was.
    for index in (other, 0):
        use(order, made[index], [index])
        assert expected(order) == []
        assert not order.used_soon()
    # It is what is expected next.
    order.begin()
    assert expected(order) == [[0], [other], [0]]


def test_uses_before_the_first_pass_are_one_of_training():
    (module,) = modules(1)
    order = Order(0)
    use(order, module, [3])
    assert expected(order) == []
    assert not order.used_soon()
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
    assert (WEIGHTS[0] in order.used_soon()) is (length == 3)


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
        assert numbered(order.used_soon()) == [1]
        use(order, second)
    order.begin()
    assert WEIGHTS[0] in order.used_soon()
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
        assert numbered(order.used_soon()) == numbered(order.used_soon()) == soon
        for module, _ in uses[1:]:
            use(order, module)
        assert not order.used_soon()
