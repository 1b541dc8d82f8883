"""`paced.py` on a disk that takes 12 s for each save, while training waits, until FOLDER/go exists."""

import runpy
import sys
import time
from pathlib import Path

from paceline.train import saving

write = saving.write_sharded


def write_slowly(world, *args):
    if world.is_main and not (Path(sys.argv[1]) / "go").exists():
        time.sleep(12)
    return write(world, *args)


saving.write_sharded = write_slowly
runpy.run_path(str(Path(__file__).with_name("paced.py")), run_name="__main__")
