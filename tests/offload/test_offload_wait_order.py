"""Steps go over shards in the order in which they were waited for (`fsdp_late_programs`, too)."""

from stepwell.store.wait_order import WaitOrder


def in_order(order, items):
    places = order.places
    return (
        list(items) if places is None else sorted(items, key=lambda one: places["abcde".index(one)])
    )


def order_after(*waits, before=None):
    order = before or WaitOrder(5)
    for indices in waits:
        order.note(indices)
    found = in_order(order, "abcde")
    # It is asked for several times in a step.
    assert in_order(order, "abcde") == found
    order.begin()
    return "".join(found)


def test_the_first_waits_lead():
    assert order_after([3], [0, 1], [3, 2], [4]) == "dabce"


def test_what_was_not_waited_for_comes_last():
    assert order_after([3], [], [1]) == "dbace"


def test_a_wait_for_all_tells_nothing():
    order = WaitOrder(5)
    assert order_after(range(5), before=order) == "abcde"
    assert order_after([4], [0, 1, 2, 3], before=order) == "eabcd"
    assert order_after([3, 2, 1, 0, 4], before=order) == "eabcd"
    assert order_after(before=order) == "eabcd"
    assert order_after([4], [1], [0, 2, 3], before=order) == "ebacd"


def test_nothing_known_is_the_order_given():
    assert in_order(WaitOrder(5), "edcba") == list("edcba")
