"""Runs until the file FOLDER/end exists: `stops_with_all.py FOLDER`.

All ranks of the round exit with 75, as those of a trainer do, after SIGTERM at any of them or if FOLDER/stop
exists.
"""

import os
import signal
import sys
import time
from pathlib import Path

folder = Path(sys.argv[1])
stop = folder / f"stop-{os.environ['MASTER_PORT']}"  # each round has a port of its own
signal.signal(signal.SIGTERM, lambda *_: stop.touch())
print(f"runs as {os.environ['RANK']} of {os.environ['WORLD_SIZE']}", flush=True)
while not (folder / "end").exists():
    if stop.exists() or (folder / "stop").exists():
        sys.exit(75)
    time.sleep(0.02)
