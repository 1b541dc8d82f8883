"""`paceline run --json`: what paceline says, an object per line on standard error."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline.finding import Finding
from paceline.watch.protocol.report import Frame, SharedPlace, Verdict
from paceline.watch.reasoning.render import build_message, render
from tests.launching.launched import Launched, paceline_run
from tests.watch.test_watcher import STEPS, WAITS

pytestmark = pytest.mark.timeout(240)
_END_S = 120.0
_FINDING = set(Finding.__annotations__)


def run_json(folder: Path, *words: str) -> tuple[int, list[dict[str, Any]], str]:
    """Return the exit code, what paceline said, and the rest of the output."""
    with Launched(folder, paceline_run("--json", *words)) as job:
        code = job.wait(_END_S)
        lines = job.text.splitlines()
    own = [line for line in lines if line.startswith("{")]
    assert "paceline: " not in job.text
    return code, [json.loads(line) for line in own], "\n".join(line for line in lines if line not in own)


def test_a_verdict(tmp_path: Path) -> None:
    words = ["--nproc-per-node", "3", "--hang-after", "4", STEPS, "sleep", "4", "1"]
    code, said, rest = run_json(tmp_path, *words)
    assert code == 1
    assert "rank 0 step 3" in rest
    error = said[-1]["error"]
    assert error["code"] == "PL800"
    assert error.keys() > _FINDING
    assert error["saw"].startswith("rank 1 never reached all_reduce number 4 of world")
    waiting, missing = error["places"]
    assert (waiting["ranks"], missing["ranks"]) == ([0, 2], [1])
    assert (waiting["frames"][0]["line"], waiting["frames"][0]["function"]) == (WAITS, "main")
    assert missing["what"] == "is asleep in time.sleep"
    assert error["where"].endswith(f"steps.py:{WAITS} in main")


def test_a_crash(tmp_path: Path) -> None:
    code, said, _ = run_json(tmp_path, "--nproc-per-node", "2", STEPS, "die", "3", "1")
    assert code == 1
    error = said[-1]["error"]
    assert (error["code"], error["rank"], error["status"]) == ("PL331", 1, -9)
    assert error["saw"] == "rank 1 was killed by SIGKILL."
    assert "Meanwhile:" in error["hint"]
    assert error["rule"]
    assert error["fix"]


def test_a_traceback(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import torch\nraise ValueError('no such thing')\n")
    _, said, rest = run_json(tmp_path, str(script))
    error = said[-1]["error"]
    assert (error["code"], error["where"]) == ("PL330", "rank 0")
    assert "train.py:2" in error["saw"]
    assert error["traceback"].splitlines()[-1] == "ValueError: no such thing"
    assert "Traceback" not in rest


def test_a_mistake(tmp_path: Path) -> None:
    code, said, _ = run_json(tmp_path, "--hang-after", "0", STEPS)
    assert code == 2
    assert [each["error"]["code"] for each in said] == ["PL349"]


def test_what_is_stated_on_the_way(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import torch\nprint(6 * 7)\n")
    with Launched(tmp_path, paceline_run("--json", str(script)), env={"OMP_NUM_THREADS": None}) as job:
        assert job.wait(_END_S) == 0
    first, second = job.text.splitlines()
    assert "OMP_NUM_THREADS" in json.loads(first)["message"]
    assert second == "42"


def test_a_training_reports_it_too(tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    command = [str(Path(sys.executable).with_name("paceline")), "train", "missing.toml", "--json"]
    with Launched(tmp_path, command) as job:
        assert job.wait(_END_S) == 2
    assert set(json.loads(job.text)["error"]) == {"code", "saw", "rule", "fix"}


def test_text_and_table_state_the_same() -> None:
    frames = (Frame("/a/train.py", 31, "step", "dist.all_reduce(x)"),)
    verdict = Verdict(
        "PL800", "it hangs", (SharedPlace((0, 1), "waits", frames),), "a rule", "a fix", ("a cause",)
    )
    message = build_message(verdict)
    assert message.text == render(verdict)
    table = json.loads(json.dumps(message.table))
    assert Finding(**{name: table[name] for name in _FINDING}) == Finding(
        "PL800", "/a/train.py:31 in step", "it hangs", "a rule", "a fix"
    )
    frame = {"file": "/a/train.py", "line": 31, "function": "step", "text": "dist.all_reduce(x)"}
    assert table["places"] == [{"ranks": [0, 1], "what": "waits", "frames": [frame]}]
    assert table["more"] == ["a cause"]
