"""An OffloadEngine whose steps are late: what does not wait reads old weights, every time."""

import contextlib
import functools
import threading

GATHERS = "stepwell-gather"
"""The thread that gathers the weights of several ranks."""
SECONDS_MAX = 30


class LateEngine:
    """Begins a step when it is first waited for, but by the thread that gathers its weights.

    That thread gathers when something waits for what it gathers: a step that began for another
    reason would be a race between that thread and what does not wait for it.

    Args:
        engine: the OffloadEngine that takes the steps.
    """

    def __init__(self, engine):
        self.inner = engine
        """What takes the steps."""
        self._may_gather = threading.Event()
        self.keep_busy = False
        """Whether it is busy for ever."""
        self.waits = []
        """The calls that have waited since the last step was submitted."""
        engine.hold()

    @property
    def is_late(self):
        return self.inner.is_held

    @property
    def busy(self):
        return self.keep_busy or self.is_late or self.inner.busy

    def release(self, **keywords):
        if not self.is_late:
            self.inner.release(**keywords)

    def begin(self):
        """The step begins, if it has not."""
        if self.is_late:
            self.waits = []
            self.inner.let_begin()
            self.inner.release(stream=0)

    def hold_gathers(self):
        """Of a step that is about to be submitted nothing is gathered before a wait."""
        self._may_gather.clear()

    def begin_to_gather(self):
        """The step begins, and so does the gathering of its weights."""
        self.begin()
        self._may_gather.set()

    def __getattr__(self, name):
        found = getattr(self.inner, name)
        return functools.partial(self._waiting, name, found) if callable(found) else found

    def _waiting(self, name, method, *args, **keywords):
        if threading.current_thread().name == GATHERS:
            assert self._may_gather.wait(SECONDS_MAX)
        else:
            self.begin()
            self.waits.append((name, *args))
        return method(*args, **keywords)


@contextlib.contextmanager
def late_ranks(patched):
    """In this context the steps of ZeRO are late, and a wait for what is gathered begins them.

    Args:
        patched: a pytest.MonkeyPatch.
    """
    from stepwell.ranks.gathering import Gatherer
    from stepwell.store.engine import Engine

    making = Engine.__init__

    def make(self, *args, **more):
        making(self, *args, **more)
        self._core = LateEngine(self._core)

    patched.setattr(Engine, "__init__", make)
    made, submission = Gatherer.__init__, Gatherer.submission

    def submit(self, *args):
        self.late.hold_gathers()
        return submission(self, *args)

    patched.setattr(Gatherer, "submission", submit)

    def init(self, core, *rest):
        made(self, core, *rest)
        self.late = core

    patched.setattr(Gatherer, "__init__", init)
    for name in ("wait", "confirm", "finish"):
        patched.setattr(Gatherer, name, _beginning(getattr(Gatherer, name)))
    yield
    patched.undo()


def _beginning(method):
    def begin(self, *args):
        self.late.begin_to_gather()
        return method(self, *args)

    return begin
