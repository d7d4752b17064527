"""The command `stepwell`, also as `python -m stepwell`."""

import sys

from stepwell.cli import app
from stepwell.cli.run import Launch

__all__ = ["main"]


def main() -> None:
    """Runs the command line of this process, and exits with its code."""
    launch = Launch()
    if not sys.stderr.isatty() and "--help" not in sys.argv:
        # Errors are lines then, and not boxes, in which they would be wrapped.
        app.rich_markup_mode = None
    try:
        app(obj=launch)
    except SystemExit:
        if launch.target is None:
            raise
    # Not within `app`, which would turn what a user's script raises into exits of its own.
    launch()


if __name__ == "__main__":
    main()
