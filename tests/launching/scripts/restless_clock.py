"""`paceline run` whose time of day jumps by two minutes, back and forth: `restless_clock.py OFF_S ARGS`."""

import sys
import time

true_time, off_s = time.time, float(sys.argv[1])


def jumping_time():
    return true_time() + (off_s if int(time.monotonic() / 1.5) % 2 else -off_s)


time.time = jumping_time

from paceline.cli.main import main  # noqa: E402

sys.exit(main(["run", *sys.argv[2:]]))
