"""The table of a measurement that `run.sh` has kept: python table.py results/NAME.json"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from paceline.bench.reduction import Reduction
from paceline.bench.spread import Spread
from paceline.cli.bench_report import describe_reduction

for path in sys.argv[1:]:
    found = json.loads(Path(path).read_text(encoding="utf-8"))
    spreads = {name: Spread(**found[name]) for name in ("fast_s", "exact_s", "ratio")}
    print(describe_reduction(Reduction(**(found | spreads))))
