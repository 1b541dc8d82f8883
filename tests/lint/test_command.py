"""`paceline lint`: files, trees, notebooks, standard input, formats, settings, comments and exit codes."""

from __future__ import annotations

import argparse
import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.cli.main import main

CORPUS = Path(__file__).parent / "corpus"
GOOD = """import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler
"""
BAD = f"{GOOD}loader = DataLoader(data, shuffle=True, sampler=DistributedSampler(data))  # PL023\n"


def lint(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(["lint", *words])
    out, err = capsys.readouterr()
    return code, out, err


def test_a_tree(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "train.py").write_text(BAD)
    (tmp_path / "good.py").write_text(GOOD)
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / "train.py").write_text(BAD)
    code, out, _ = lint(capsys, str(tmp_path))
    assert code == 1
    assert f"{tmp_path}/sub/train.py:3:10: error: shuffle=True and a sampler. [PL023]" in out
    assert "1 error in 2 files." in out


def test_nothing_found(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = lint(capsys, str(CORPUS / "pl023_ok_false.py"))
    assert (code, out) == (0, "No mistake found in 1 file.\n")
    code, out, _ = lint(capsys, str(Path(__file__).parent / "__init__.py"))
    assert (code, out) == (0, "Nothing to check: no word of distributed training in 1 file.\n")


def test_scripts_whose_words_are_elsewhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    package = tmp_path / "trainer"
    (package / "tools").mkdir(parents=True)
    (package / "tools" / "comm.py").write_text("import torch.distributed as dist\nbarrier = dist.barrier\n")
    (package / "tools" / "__init__.py").write_text("from . import comm\n")
    on_rank_0 = "import os\nif os.environ['RANK'] == '0':\n   "
    on_rank_0 = "import os\nif os.environ['RANK'] == '0':\n   "
    scripts = {
        package / "train.py": f"from .tools import (\n    comm,\n)\n{on_rank_0} comm.barrier()\n",
        tmp_path / "short.py": f"import sys\nfrom trainer.tools import comm as c\n{on_rank_0} c.barrier()\n",
        tmp_path / "second.py": f"from short import c\n{on_rank_0} c.barrier()\n",
        tmp_path / "lines.py": f"from torch import (\n    distributed as d,\n)\n{on_rank_0} d.barrier()\n",
        tmp_path / "ours.py": "import torch, paceline\nwith paceline.start() as world:\n"
        "    trainer = paceline.Trainer(model)\n    if world.is_main:\n        trainer.save()\n",
    }
    for path, text in scripts.items():
        path.write_text(text)
        code, out, _ = lint(capsys, str(path))
        assert (code, "[PL001]" in out) == (1, True), (path, out)


def test_standard_input(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(BAD))
    assert lint(capsys, "-")[0] == 1
    monkeypatch.setattr("sys.stdin", io.StringIO(BAD))
    code, _, err = lint(capsys, "-", "--fix")
    assert code == 2
    assert "[PL095]" in err


def test_a_notebook(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cells = [
        {"cell_type": "markdown", "source": ["# Title"]},
        {"cell_type": "code", "source": ["%matplotlib inline\n", *GOOD.splitlines(keepends=True)]},
        {"cell_type": "code", "source": f"x = 1\n{BAD.splitlines()[2]}\n"},
    ]
    path = tmp_path / "train.ipynb"
    path.write_text(json.dumps({"cells": cells}))
    code, out, _ = lint(capsys, str(path), "--json")
    [finding] = json.loads(out)
    assert code == 1
    assert (finding["path"], finding["line"], finding["code"]) == (f"{path}#cell2", 2, "PL023")


def test_formats(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "train.py"
    path.write_text(BAD)
    _, out, _ = lint(capsys, str(path), "--format", "github")
    assert out.startswith(f"::error file={path},line=3,col=10,title=PL023::shuffle=True and a sampler.")
    _, out, _ = lint(capsys, str(path), "--format", "sarif")
    [run] = json.loads(out)["runs"]
    assert [rule["id"] for rule in run["tool"]["driver"]["rules"]] == ["PL023"]
    assert run["results"][0]["locations"][0]["physicalLocation"]["region"]["startLine"] == 3
    code, out, err = lint(capsys, str(path), "--format", "beside")
    assert (code, out) == (0, "")
    assert err.startswith(f"paceline: {path}:3: shuffle=True and a sampler. ")


def test_comments(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "train.py"
    path.write_text(BAD.replace("  # PL023", "  # paceline: ignore[PL023]"))
    assert lint(capsys, str(path))[0] == 0
    path.write_text(GOOD + "x = 1  # paceline: ignore[PL023]\ny = '# paceline: ignore'\n")
    code, out, _ = lint(capsys, str(path))
    assert code == 1
    assert "`paceline: ignore[PL023]` silences nothing. [PL098]" in out
    assert out.count("PL098") == 1


def test_settings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "train.py"
    path.write_text(BAD)
    project = tmp_path / "pyproject.toml"
    for text, code in (
        ('level = { PL023 = "off" }', 0),
        ('level = { PL023 = "advice" }', 0),
        ('level = { PL023 = "warning" }', 1),
        ('level = { all = "off", PL023 = "error" }', 1),
        ('per-file = { "train.py" = { all = "off" } }', 0),
        ('per-file = { "train*" = { PL023 = "off" } }', 0),
        ('per-file = { "tests/*" = { PL023 = "off" } }', 1),
        ('level = { PL700 = "off" }', 2),
        ('level = { PL023 = "none" }', 2),
        ('ignore = ["PL023"]', 2),
    ):
        project.write_text(f"[tool.paceline.lint]\n{text}\n")
        found, _, err = lint(capsys, str(path))
        assert found == code, text
        assert ("[PL096]" in err) == (code == 2), text


def test_wrong_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = lint(capsys, str(tmp_path / "none.py"))
    assert code == 2
    assert "[PL097]" in err
    path = tmp_path / "train.py"
    path.write_text("import torch.distributed\ndef f(:\n")
    code, out, _ = lint(capsys, str(path))
    assert code == 1
    assert "train.py:2:7: error: invalid syntax. [PL099]" in out


def test_a_tree_of_odd_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "other.py").write_bytes(b"# caf\xe9\nprint(1)\n")
    (tmp_path / "broken.py").symlink_to("none.py")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "loop").symlink_to(tmp_path)
    assert lint(capsys, str(tmp_path))[:2] == (
        0,
        "Nothing to check: no word of distributed training in 1 file.\n",
    )
    (tmp_path / "latin.py").write_bytes(b"# caf\xe9\n" + BAD.encode())
    (tmp_path / "train.ipynb").write_text("{} torch.distributed")
    (tmp_path / "closed.py").write_text(BAD)
    (tmp_path / "python2.py").write_text(f'{GOOD}print "x"\n')
    open_file = Path.read_bytes

    def refuse(path: Path) -> bytes:
        if path.name == "closed.py":
            raise PermissionError(13, "Permission denied")
        return open_file(path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "read_bytes", refuse)
        code, out, _ = lint(capsys, str(tmp_path))
    assert code == 1
    assert out.count("[PL097]") == 3
    assert "closed.py:1:1: warning: it cannot be read: Permission denied. [PL097]" in out
    assert "latin.py:1:1: warning: it cannot be read: invalid or missing encoding declaration" in out
    assert "python2.py:3:1: error: Missing parentheses in call to 'print'." in out
    assert "1 error and 3 warnings in 5 files." in out
    for name in ("latin.py", "train.ipynb"):
        code, _, err = lint(capsys, str(tmp_path / name))
        assert code == 2
        assert "[PL097]" in err


@pytest.mark.parametrize("tail", ["x = 1\n" * 70_000, f"x = {'-' * 100_000}1\n"], ids=["long", "deep"])
def test_a_script_that_is_too_large(tail: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "train.py"
    path.write_text(GOOD + tail)
    code, out, _ = lint(capsys, str(path))
    assert code == 0
    assert "train.py:1:1: advice: it is too large or too deeply nested to simulate" in out


def test_a_fix_keeps_encoding_and_line_ends(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "train.py"
    loop = (CORPUS / "pl030_bad_tensor_parallel.py").read_text()
    text = f"# -*- coding: latin-1 -*-\n# caf\xe9\n{loop}".replace("\n", "\r\n")
    path.write_bytes(text.encode("latin-1"))
    assert lint(capsys, str(path), "--fix")[0] == 0
    assert path.read_bytes() == (text + "    optimizer.zero_grad()\r\n").encode("latin-1")


def test_fix_and_diff(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "train.py"
    path.write_text(BAD)
    code, out, _ = lint(capsys, str(path), "--diff")
    assert code == 1
    assert "+loader = DataLoader(data, sampler=DistributedSampler(data))" in out
    assert path.read_text() == BAD
    assert lint(capsys, str(path), "--fix")[0] == 0
    assert "shuffle" not in path.read_text()


def test_no_torch() -> None:
    script = str(CORPUS / "pl001_bad_barrier_in_if.py")
    lines = f"import sys, paceline.cli.main as m; m.main(['lint', {script!r}])"
    code = f"{lines}; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_beside_a_job(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from paceline.cli.lint import lint_beside

    path = tmp_path / "train.py"
    path.write_text((CORPUS / "pl055_bad_rank_is_device.py").read_text() + BAD)
    for one_node, codes in ((True, ["PL023"]), (False, ["PL055", "PL023"])):
        thread = lint_beside(str(path), as_json=True, one_node=one_node, advice=False)
        assert thread is not None
        thread.join(timeout=60)
        lines = capfd.readouterr().err.splitlines()
        assert [json.loads(line)["lint"]["code"] for line in lines] == codes
    path.write_text((CORPUS / "pl060_bad_loss_of_each_step.py").read_text())
    for advice, codes in ((True, ["PL060"]), (False, [])):
        thread = lint_beside(str(path), as_json=True, one_node=True, advice=advice)
        assert thread is not None
        thread.join(timeout=60)
        lines = capfd.readouterr().err.splitlines()
        assert [json.loads(line)["lint"]["code"] for line in lines] == codes
    path.write_text("print(1)\n")
    for name in (path, tmp_path / "none.py"):
        assert lint_beside(str(name), as_json=True, one_node=True, advice=False) is None


def test_before_a_benchmark(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from paceline.cli.bench import _check_script

    path = tmp_path / "train.py"
    path.write_text(BAD)
    _check_script(argparse.Namespace(target=str(path), set=[], json=False))
    assert capfd.readouterr().err.startswith(f"paceline: {path}:3: shuffle=True and a sampler.")
