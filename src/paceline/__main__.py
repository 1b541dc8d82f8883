"""`python -m paceline` is the same as `paceline`."""

import sys

from paceline.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
