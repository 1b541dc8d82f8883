"""Runs `paceline run` with the rendezvous' wall clock off: `skewed.py SECONDS ARGS`."""

import datetime
import sys

import torch.distributed.elastic.rendezvous.dynamic_rendezvous as theirs

import paceline.launching.elastic.shared_state as ours
from paceline.cli.main import main

off_s = float(sys.argv[1])


class Skewed(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return datetime.datetime.now(tz) + datetime.timedelta(seconds=off_s)


theirs.datetime = ours.datetime = Skewed
sys.exit(main(["run", *sys.argv[2:]]))
