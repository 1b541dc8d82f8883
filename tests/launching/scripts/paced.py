"""`paceline train` that can be watched: `paced.py FOLDER train RECIPE ...`.

Each rank appends a line per step to FOLDER/steps: its world size, the step, the epoch, and the places of its
samples in the epoch's order. After step 5, steps take a second until FOLDER/go exists.
"""

import sys
import time
from pathlib import Path

from paceline.cli.main import main
from paceline.train.trainer import Trainer

folder = Path(sys.argv[1])
take_step = Trainer.step


def take_slow_step(self, batch):
    places = [batch.start + place for samples in batch.samples for place in samples]
    step = take_step(self, batch)
    with (folder / "steps").open("a") as file:
        file.write(f"{self.world.world_size} {step.number} {step.epoch} {','.join(map(str, places))}\n")
    if step.number >= 5 and not (folder / "go").exists():
        time.sleep(1)
    return step


Trainer.step = take_slow_step
sys.exit(main(sys.argv[2:]))
