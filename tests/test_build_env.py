"""The builder of the environment: what it installs and when, and that nothing half made counts."""

from __future__ import annotations

import builtins
import importlib.util
import re
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent


class Project:
    """A project with two locks, and a record of what would have been run."""

    def __init__(self, folder: Path, builder: ModuleType) -> None:
        self.folder = folder
        self.venv = folder / ".venv"
        self.ran: list[list[str]] = []
        self.fail_at: str | None = None
        self.fail_with: BaseException = subprocess.CalledProcessError(1, ["pip"])
        self._builder = builder
        self.write("pyproject.toml", "[project]")
        self.write("a.lock", "# comment\nnumpy==1.0  # reason\ntorch==2.0\n\n")
        self.write("b.lock", "deepspeed==3.0\naccelerate==4.0\n")

    def write(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text)

    def run(self, command: tuple[str, ...], **_: Any) -> None:
        words = list(command)
        self.ran.append(words)
        if self.fail_at is not None and self.fail_at in words:
            raise self.fail_with
        if words[1:3] == ["-m", "venv"]:
            (Path(words[3]) / "bin").mkdir(parents=True, exist_ok=True)

    def build(self, *words: str) -> int:
        code: int = self._builder.main([str(self.venv), *(words or ("a.lock",))])
        return code

    def installed(self) -> list[list[str]]:
        """Return the packages that each installation was asked for, and forget them."""
        found = [words[words.index("-q") + 1 :] for words in self.ran if "-q" in words]
        self.ran.clear()
        return found

    @property
    def itself(self) -> list[str]:
        return ["--no-deps", "--no-build-isolation", "-e", str(self.folder)]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    spec = importlib.util.spec_from_file_location("build_env", ROOT / "tools" / "build_env.py")
    assert spec is not None
    assert spec.loader is not None
    builder = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(builder)
    project = Project(tmp_path, builder)
    monkeypatch.setattr(builder, "ROOT", str(tmp_path))
    monkeypatch.setattr(builder.subprocess, "run", project.run)
    return project


def test_torch_comes_first_and_alone(project: Project) -> None:
    assert project.build() == 0
    assert project.installed() == [["torch==2.0"], ["torch==2.0", "numpy==1.0"], project.itself]


def test_what_builds_on_torch_comes_last(project: Project) -> None:
    assert project.build("a.lock", "b.lock") == 0
    assert project.installed() == [
        ["torch==2.0"],
        ["torch==2.0", "numpy==1.0", "accelerate==4.0"],
        ["--no-build-isolation", "deepspeed==3.0"],
        project.itself,
    ]


def test_a_version_takes_the_place_of_a_pin(project: Project) -> None:
    assert project.build("a.lock", "torch==1.9") == 0
    assert project.installed() == [["torch==1.9"], ["torch==1.9", "numpy==1.0"], project.itself]
    assert project.build("a.lock", "torch==1.9") == 0
    assert project.installed() == []
    assert project.build("a.lock", "torch==1.8") == 0
    assert ["torch==1.8"] in project.installed()


def test_the_second_call_does_nothing(project: Project) -> None:
    project.build()
    project.ran.clear()
    assert project.build() == 0
    assert project.ran == []


def test_a_changed_lock_builds_from_scratch(project: Project) -> None:
    project.build()
    (project.venv / "left").touch()
    project.write("a.lock", "torch==2.1\n")
    project.ran.clear()
    assert project.build() == 0
    assert ["torch==2.1"] in project.installed()
    assert not (project.venv / "left").exists()


def test_a_changed_project_installs_only_itself(project: Project) -> None:
    project.build()
    project.write("pyproject.toml", "[project]\n")
    project.ran.clear()
    assert project.build() == 0
    assert project.installed() == [project.itself]


@pytest.mark.parametrize("fail_at", ["venv", "torch==2.0", "numpy==1.0", "-e"])
@pytest.mark.parametrize(
    ("fault", "code"), [(subprocess.CalledProcessError(1, ["pip"]), 1), (KeyboardInterrupt(), 1)]
)
def test_a_failed_build_leaves_no_stamp_and_is_started_over(
    project: Project, fail_at: str, fault: BaseException, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    project.fail_at, project.fail_with = fail_at, fault
    assert project.build() == code
    assert "starts over" in capsys.readouterr().err
    assert not (project.venv / ".stamp").exists()
    (project.venv / "half").touch()
    project.fail_at = None
    project.ran.clear()
    assert project.build() == 0
    assert len(project.installed()) == 3
    assert not (project.venv / "half").exists()


def test_a_failed_reinstall_of_the_project_is_no_success(project: Project) -> None:
    project.build()
    project.write("pyproject.toml", "[project]\n")
    project.fail_at = "-e"
    assert project.build() == 1
    project.fail_at = None
    project.ran.clear()
    assert project.build() == 0
    assert project.itself in project.installed()


def test_an_environment_made_by_hand_is_not_deleted(project: Project) -> None:
    project.venv.mkdir()
    (project.venv / "mine").touch()
    assert project.build() == 0
    assert (project.venv / "mine").exists()


def test_what_a_link_points_to_is_not_touched(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    theirs = project.folder / "theirs"
    (theirs / "bin").mkdir(parents=True)
    project.venv.symlink_to(theirs)
    assert project.build() == 2
    assert f"is a link to {theirs}" in capsys.readouterr().err
    assert project.ran == []
    assert [path.name for path in theirs.rglob("*")] == ["bin"]
    project.venv.unlink()
    assert project.build() == 0


def test_a_moved_environment_is_built_again(project: Project) -> None:
    project.build()
    project.venv.rename(project.folder / "elsewhere")
    project.venv = project.folder / "elsewhere"
    project.ran.clear()
    assert project.build() == 0
    assert len(project.installed()) == 3


def test_two_at_once_take_turns(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    inside: list[int] = []
    run = project.run

    def slow(command: tuple[str, ...], **keywords: Any) -> None:
        inside.append(threading.get_ident())
        assert len(set(inside)) == 1, "two builders at work"
        time.sleep(0.05)
        run(command, **keywords)

    monkeypatch.setattr(project._builder.subprocess, "run", slow)
    codes: list[int] = []
    threads = [threading.Thread(target=lambda: codes.append(project.build())) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert codes == [0, 0, 0]
    assert len(project.installed()) == 3


def test_children_inherit_the_lock(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(
        project._builder.subprocess, "run", lambda command, **keywords: seen.append(keywords["pass_fds"])
    )
    project.build()
    assert seen
    assert all(len(fds) == 1 for fds in seen)


def test_an_old_python_is_refused(
    project: Project, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(project._builder, "MIN_PYTHON", (sys.version_info[0], sys.version_info[1] + 1))
    assert project.build() == 2
    error = capsys.readouterr().err
    assert "PYTHON=" in error
    assert sys.version.split()[0] in error
    assert project.ran == []


def test_a_python_without_venv_is_refused(
    project: Project, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real: Callable[..., ModuleType] = builtins.__import__

    def without_venv(name: str, *args: Any, **keywords: Any) -> ModuleType:
        if name == "ensurepip":
            raise ImportError("no module", name=name)
        return real(name, *args, **keywords)

    monkeypatch.setattr(builtins, "__import__", without_venv)
    assert project.build() == 2
    assert "python3-venv" in capsys.readouterr().err
    assert project.ran == []


def test_the_locks_pin_everything_exactly() -> None:
    for name in ("requirements.lock", "requirements-bench.lock", "requirements-docs.lock"):
        lines = [line.split("#")[0].strip() for line in (ROOT / name).read_text().splitlines()]
        pins = [line for line in lines if line]
        names = [pin.partition("==")[0].lower() for pin in pins]
        assert names == sorted(names), name
        for pin in pins:
            package, _, version = pin.partition("==")
            assert package, pin
            assert version, pin
            assert "+" not in version, f"{pin}: a local version exists on one machine only"


def test_every_direct_dependency_is_pinned_with_its_reason() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    for name, wanted in (
        ("requirements.lock", project["dependencies"] + extras["dev"]),
        ("requirements-bench.lock", extras["bench"]),
        ("requirements-docs.lock", extras["docs"]),
    ):
        reasons = {
            _normal(line.partition("==")[0]): line.partition("#")[2].strip()
            for line in (ROOT / name).read_text().splitlines()
        }
        for requirement in wanted:
            assert reasons.get(_normal(re.split(r"[<>=~!\[]", requirement)[0])), f"{requirement} in {name}"


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
