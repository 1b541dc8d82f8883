"""`paceline train` with a line per step of each rank: `logged.py FOLDER PACE_S train RECIPE ...`.

A line of FOLDER/steps has the rank's round (where its ranks meet), node, world size, step, epoch, the places
of its samples in the epoch's order, and the machine's monotonic clock. Steps take PACE_S more until FOLDER/go
exists.
"""

import json
import os
import sys
import time
from pathlib import Path

from paceline.cli.main import main
from paceline.train.trainer import Trainer

folder, pace_s = Path(sys.argv[1]), float(sys.argv[2])
meeting = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
take_step = Trainer.step


def take_logged_step(self, batch):
    places = [batch.start + place for samples in batch.samples for place in samples]
    step = take_step(self, batch)
    row = {"round": meeting, "node": os.uname().nodename, "size": self.world.world_size}
    row |= {"step": step.number, "epoch": step.epoch, "places": places, "at_s": time.monotonic()}
    with (folder / "steps").open("a") as file:
        file.write(json.dumps(row) + "\n")
    if not (folder / "go").exists():
        time.sleep(pace_s)
    return step


Trainer.step = take_logged_step
sys.exit(main(sys.argv[3:]))
