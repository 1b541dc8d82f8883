"""`python -m paceline` is the same as `paceline`."""

import signal
import sys

_handler = signal.getsignal(signal.SIGINT)
if _handler is signal.default_int_handler:  # no traceback of a Ctrl-C while this imports
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from paceline.cli.main import main  # noqa: E402

signal.signal(signal.SIGINT, _handler)

if __name__ == "__main__":
    sys.exit(main())
