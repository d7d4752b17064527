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
        self._submission = None
        self._may_gather = threading.Event()
        self.keep_busy = False
        """Whether it is busy for ever."""
        self.waits = []
        """The calls that have waited since the last step was submitted."""
        self.stepped = []
        """The tensors of the last step, in its order."""
        if hasattr(engine, "hold"):
            # Of steps that begin past this object.
            engine.hold()

    def submit(self, *args, **keywords):
        self._may_gather.clear()
        self.stepped = args[0] if args else []
        self._submission = functools.partial(self.inner.submit, *args, **keywords)
        self.waits = []

    @property
    def is_late(self):
        return self._submission is not None or self._is_held

    @property
    def _is_held(self):
        return getattr(self.inner, "is_held", False)

    @property
    def busy(self):
        return self.keep_busy or self.is_late or self.inner.busy

    def release(self, **keywords):
        if not self.is_late:
            self.inner.release(**keywords)

    def begin(self):
        """The step begins, if it has not."""
        if self._submission is not None:
            submit, self._submission = self._submission, None
            submit()
        elif not self._is_held:
            return
        else:
            self.waits = []
        if hasattr(self.inner, "let_begin"):
            self.inner.let_begin()
        self.inner.release(stream=0)

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
    from stepwell import _core
    from stepwell.ranks.gathering import Gatherer

    engine = _core.OffloadEngine
    patched.setattr(_core, "OffloadEngine", lambda *args, **more: LateEngine(engine(*args, **more)))
    made = Gatherer.__init__

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
