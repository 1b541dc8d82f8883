"""Lints the training scripts of cloned repositories, and prints what was found in each: one row per script.

python benchmarks/lint/check_scripts.py CLONES > benchmarks/lint/public_scripts.tsv

CLONES has a folder per repository, `owner+name`, with the file `.commit`. A script counts if it makes a
process group, wraps a model or makes an Accelerator, and calls backward; tests don't count.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from paceline.lint import check_text

DISTRIBUTED = re.compile(
    r"init_process_group|DistributedDataParallel|FullyShardedDataParallel|fully_shard|Accelerator\("
)


def main() -> None:
    """Print the rows."""
    print("repository", "commit", "script", "found", sep="\t")
    for repository in sorted(Path(sys.argv[1]).iterdir()):
        commit = (repository / ".commit").read_text().strip()
        for path in sorted(repository.rglob("*.py")):
            text = path.read_text(encoding="utf-8", errors="replace")
            inner = path.relative_to(repository).as_posix()
            if not DISTRIBUTED.search(text) or "backward(" not in text or "test" in inner.lower():
                continue
            try:
                found = sorted({f"{finding.code}:{finding.line}" for finding in check_text(text, str(path))})
            except SyntaxError:
                found = ["not Python 3"]
            name = repository.name.replace("+", "/")
            print(name, commit[:12], inner, " ".join(found) or "nothing", sep="\t")


if __name__ == "__main__":
    main()
