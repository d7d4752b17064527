"""Ctrl-C, and other signals' handlers, that come amid what a test does."""

import contextlib
import signal
import threading


@contextlib.contextmanager
def handler_runs_after(seconds, handler=signal.default_int_handler):
    """Within it `handler` runs once, in the main thread, unless the body has ended before.

    The default is Ctrl-C, which may also come directly behind the body: KeyboardInterrupt leaves
    this context. The signal is neither SIGINT, which workers of pytest ignore, nor SIGALRM, by
    which pytest ends a test that hangs.
    """
    is_over = False

    def run(number, frame):
        if not is_over:
            handler(number, frame)

    kept = signal.signal(signal.SIGUSR1, run)
    main = threading.main_thread().ident
    timer = threading.Timer(seconds, signal.pthread_kill, (main, signal.SIGUSR1))
    timer.start()
    try:
        yield
    finally:
        is_over = True
        timer.cancel()
        timer.join()
        for _ in range(2):
            # Python calls the handler of a signal that has come where a loop goes round.
            pass
        signal.signal(signal.SIGUSR1, kept)
