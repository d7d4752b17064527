"""Finalizers that wait for steps, and threads that steps wait for."""

import threading

from stepwell.access.finalizers import finalize, postponed


class Owner:
    """Something that goes."""


def owners_of(called, count):
    owners = [Owner() for _ in range(count)]
    for index, owner in enumerate(owners):
        finalize(owner, called.append, index)
    return owners


def test_a_finalizer_is_called_when_its_owner_goes():
    called = []
    owners = owners_of(called, 2)
    assert not called
    del owners[0]
    assert called == [0]


def test_a_thread_that_a_step_waits_for_calls_finalizers_when_it_says_so():
    called = []
    owners = owners_of(called, 6)
    with postponed() as call_finalizers:
        del owners[0]
        del owners[0]
        assert not called
        call_finalizers()
        assert called == [0, 1]
        del owners[0]
        # Another thread does not wait.
        thread = threading.Thread(target=owners.pop)
        thread.start()
        thread.join()
        assert called == [0, 1, 5]
    assert called == [0, 1, 5, 2]
    del owners[0]
    assert called == [0, 1, 5, 2, 3]
