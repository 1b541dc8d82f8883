"""A script that runs torch's profiler itself finds in its rows what it finds without the watch."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

_SCRIPT = """
import json, sys
import torch

model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with torch.profiler.profile(with_stack=True) as profiler:
    for _ in range(5):
        model(torch.ones(4, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
names = [event.name for event in profiler.events()]
json.dump(names, open(sys.argv[1], "w"))
"""


def _record(tmp_path: Path, *words: str) -> Counter[str]:
    script, found = tmp_path / "train.py", tmp_path / "names.json"
    script.write_text(_SCRIPT)
    done = subprocess.run([*words, str(script), str(found)], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return Counter(json.loads(found.read_text()))


@pytest.mark.timeout(120)
def test_its_rows_are_those_of_the_script(tmp_path: Path) -> None:
    alone = _record(tmp_path, sys.executable)
    watched = _record(tmp_path, sys.executable, "-m", "paceline", "run", "--nproc-per-node", "1")
    operators = [{name: n for name, n in names.items() if "::" in name} for names in (alone, watched)]
    assert operators[0] == operators[1]
    # The frames above the script, two calls per step, and a call per watched gradient.
    assert sum(n for name, n in watched.items() if name.startswith("paceline")) < 120
