"""Fixes parse, lint clean and change nothing else."""

from __future__ import annotations

import ast
import difflib
from pathlib import Path

import pytest

from paceline.lint import check_text
from paceline.lint.fix import fix_text

CORPUS = Path(__file__).parent / "corpus"
FIXABLE = [
    "pl022_bad",
    "pl023_bad_both",
    "pl030_bad",
    "pl040_bad_module",
    "pl043_bad",
    "pl058_bad",
]
SCRIPTS = [path for name in FIXABLE for path in sorted(CORPUS.glob(f"{name}*.py"))]


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_a_fix(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    code = path.stem[:5].upper()
    findings = [finding for finding in check_text(text, str(path)) if finding.code == code]
    fixed, count = fix_text(text, findings)
    assert count == len(findings) > 0
    ast.parse(fixed)
    assert not [finding for finding in check_text(fixed, str(path)) if finding.code == code]
    changed = [line for line in difflib.ndiff(text.splitlines(), fixed.splitlines()) if line[0] in "+-"]
    assert 1 <= len(changed) <= 3, changed


def test_what_has_no_fix_stays() -> None:
    text = (CORPUS / "pl001_bad_barrier_in_if.py").read_text(encoding="utf-8")
    assert fix_text(text, check_text(text, "x.py")) == (text, 0)


def test_bytes_before_a_fix_count() -> None:
    line = 'print("äöü"); loader = DataLoader(data, shuffle=True, sampler=DistributedSampler(data))\n'
    names = "from torch.utils.data import DataLoader, DistributedSampler\n"
    text = f"import torch.distributed as dist\n{names}\n{line}"
    fixed, count = fix_text(text, check_text(text, "x.py"))
    assert count == 1
    assert fixed.endswith('print("äöü"); loader = DataLoader(data, sampler=DistributedSampler(data))\n')
