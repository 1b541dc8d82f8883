"""Runs `paceline run` with the rendezvous' wall clock off: `skewed.py SECONDS ours|torchs ARGS`.

`torchs`: with torch's own way to tell which nodes live.
"""

import datetime
import sys

import torch.distributed.elastic.rendezvous.dynamic_rendezvous as theirs

import paceline.torch_seams.elastic as ours
from paceline.cli.main import main

off_s, state = float(sys.argv[1]), sys.argv[2]


class Skewed(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return datetime.datetime.now(tz) + datetime.timedelta(seconds=off_s)


theirs.datetime = ours.datetime = Skewed
if state == "torchs":
    ours.OwnClockState = theirs._BackendRendezvousStateHolder
sys.exit(main(["run", *sys.argv[3:]]))
