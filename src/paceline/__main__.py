"""`python -m paceline` is the same as `paceline`."""

import signal
import sys

_handler = signal.getsignal(signal.SIGINT)
if _handler is signal.default_int_handler:  # no traceback of a Ctrl-C while this imports
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from paceline.cli import main as command  # noqa: E402

signal.signal(signal.SIGINT, _handler)


def main() -> int:
    """Run the command. A Ctrl-C that comes once it has failed does not replace its exit code."""
    code = command.main()
    if code:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Python's end sets any other handler aside first
    return code


if __name__ == "__main__":
    sys.exit(main())
