"""Compare fine-tuning by three peers with Paceline's: losses and lines changed.

pip install accelerate lightning
python benchmarks/finetuning/run.py
"""

from __future__ import annotations

import difflib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PEERS = ("accelerate_loop", "hf_trainer", "lightning_module")
LAYOUTS = (("", 1), ("dp_replicate=2", 2), ("dp_shard=2", 2), ("tp=2", 2))


def run(script: str, layout: str = "", nproc: int = 1) -> dict[str, Any]:
    """Run a script and return what it reports."""
    command = [sys.executable]
    if nproc > 1:
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(nproc)]
    quiet = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(
        [*command, str(HERE / f"{script}.py"), *layout.split()], capture_output=True, text=True, env=quiet
    )
    rows = [line for line in done.stdout.splitlines() if line.startswith('{"losses"')]
    if len(rows) != 1:
        sys.exit(f"{script}: {done.stdout}{done.stderr}")
    found: dict[str, Any] = json.loads(rows[0])
    return found


def count_changes(old: str, new: str) -> tuple[int, int]:
    """Return how many lines of one script go, and how many come."""
    lines = [(HERE / f"{name}.py").read_text(encoding="utf-8").splitlines() for name in (old, new)]
    marks = [line[0] for line in difflib.ndiff(*lines)]
    return marks.count("-"), marks.count("+")


def main() -> None:
    """Print a line per pair and layout."""
    sys.path.insert(0, str(HERE))
    from task import make_model

    make_model()
    peers = {name: run(name) for name in PEERS}
    for own in ("paceline_loop", "paceline_trainer"):
        for layout, nproc in LAYOUTS:
            found = run(own, layout, nproc)
            for name, peer in peers.items():
                pairs = list(zip(found["losses"], peer["losses"], strict=True))
                most = max(abs(one - other) / abs(other) for one, other in pairs)
                gone, new = count_changes(name, own)
                print(
                    f"{own:16} {layout or 'one process':14} against {name:16}: {len(pairs)} losses, largest "
                    f"relative difference {most:.1e}; accuracy {found['accuracy']:.3f} and "
                    f"{peer['accuracy']:.3f}; lines -{gone} +{new}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
