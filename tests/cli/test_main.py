"""The command line as a whole, `paceline explain`, and the names that `import paceline` offers."""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import os
import pydoc
import resource
import shlex
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import paceline
from paceline.cli import explain
from paceline.cli.examples import EXAMPLES
from paceline.cli.main import build_parser, main
from paceline.codes import read_pages
from paceline.errors import PacelineError
from paceline.launching.ending.endings import RankFailed
from paceline.recipe import load_recipe

HEAVY = ("torch", "numpy", "pydantic", "safetensors", "tokenizers", "plotext", "psutil")
REPOSITORY = Path(__file__).parents[2]


def run(*words: str, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, **options)


@pytest.mark.parametrize(
    "words",
    [[], ["train"], ["bench"], ["bench", "scaling"], ["checkpoint"], ["checkpoint", "show"], ["explain"]],
)
def test_help_imports_nothing_heavy(words: list[str]) -> None:
    code = f"""
import sys
from paceline.cli.main import main
try:
    main({[*words, "--help"]!r})
except SystemExit as exit:
    assert exit.code == 0
print(*[name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)
"""
    done = run("-c", code, check=True)
    assert done.stdout.startswith("usage: paceline")
    assert done.stderr.split() == []


def list_commands(parser: argparse.ArgumentParser, words: str = "") -> Iterator[tuple[str, str]]:
    """The words of each command with its help's end."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, command in action.choices.items():
                yield f"{words} {name}".strip(), command.epilog or ""
                yield from list_commands(command, f"{words} {name}".strip())


def test_each_command_has_an_example_that_can_be_typed() -> None:
    commands = dict(list_commands(build_parser()))
    assert sorted(commands) == sorted(EXAMPLES)
    for words, example in EXAMPLES.items():
        assert commands[words].endswith(f"example: paceline {example}")
        assert build_parser().parse_args(shlex.split(example)).command == words.split()[0]


def test_help_is_a_command_too(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["help"], ["help", "bench", "scaling"]):
        with pytest.raises(SystemExit) as ended:
            main(words)
        assert ended.value.code == 0
        assert capsys.readouterr().out.startswith(f"usage: {' '.join(['paceline', *words[1:]])} ")


def test_built_in_recipes_are_listed_printed_and_found_by_name(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names = sorted(path.stem for path in (REPOSITORY / "recipes").glob("*.toml"))
    assert main(["recipes"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == names
    for name in names:
        assert main(["recipes", name]) == 0
        text = capsys.readouterr().out
        assert text == (REPOSITORY / "recipes" / f"{name}.toml").read_text(encoding="utf-8")
        assert load_recipe(name) == load_recipe(REPOSITORY / "recipes" / f"{name}.toml")
    assert main(["recipes", "nothing"]) == 2
    assert "There are encoder-dropout, gpt-islands, gpt-stdlib" in capsys.readouterr().err
    with pytest.raises(PacelineError, match="PL121"):
        load_recipe("nothing")


def test_a_word_finds_pages(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "interface"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("PL977") for line in lines)
    assert all("interface" in line.lower() for line in lines)


def test_profile_alone_says_what_to_type(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile"]) == 2
    assert "`paceline profile SCRIPT`" in capsys.readouterr().err


def test_help_answers_at_once() -> None:
    """The processor's time of the fastest of some tries, as other tests may keep the machine busy."""
    times_s = []
    while len(times_s) < 20 and min(times_s, default=1.0) > 0.3:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        run("-m", "paceline", "--help", check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times_s.append(after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime)
    assert min(times_s) <= 0.3


def test_options_after_a_script_are_explained() -> None:
    found = run("-m", "paceline", "launch", "slurm", "train.py", "--nodes", "2", "--time", "1:00:00")
    assert found.returncode == 2
    assert "required: --nodes, --time. They come before the recipe or script" in found.stderr


def test_version_is_the_projects() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    assert paceline.__version__ == project["version"]
    assert run("-m", "paceline", "--version").stdout == f"paceline {project['version']}\n"


def test_without_a_command_the_help_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert "train" in output.err


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["trian", "x.toml"], "Did you mean train?"),
        (["--verison"], "Did you mean --version?"),
        (["train", "x.toml", "--nprocs", "2"], "Did you mean --nproc?"),
        (["train", "x.toml", "--otu=runs/a"], "Did you mean --out?"),
        (["checkpoint", "veryfi", "runs/a"], "Did you mean verify?"),
        (["bench", "scalling", "x.toml"], "Did you mean scaling?"),
        (["bake"], "See paceline --help."),
        (["train"], "RECIPE. See paceline train --help."),
        (["train", "x.toml", "--nproc", "two"], "invalid int value: 'two'"),
    ],
)
def test_what_was_meant(words: list[str], meant: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(words)
    assert exit_.value.code == 2
    message = capsys.readouterr().err
    assert meant in message
    assert message.count("\n") == 1


def test_a_mistake_is_reported_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "nowhere.toml"]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("paceline: nowhere.toml does not exist.")
    assert output.err.endswith("[PL121]\n")


def test_a_mistake_is_reported_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "nowhere.toml", "--json"]) == 2
    output = capsys.readouterr()
    assert output.err == ""
    error = json.loads(output.out)["error"]
    assert error["code"] == "PL121"
    assert error["saw"] == "nowhere.toml does not exist."
    assert set(error) == {"code", "saw", "rule", "fix"}


def test_all_problems_of_a_recipe_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tmp_path / "bad.toml"
    recipe.write_text(
        '[model]\nkind = "gpt"\nlayers = 0\n[data]\nkind = "text"\nsize = 1\n[train]\nsteps = 1\n'
    )
    assert main(["train", str(recipe), "--json"]) == 2
    told = json.loads(capsys.readouterr().out)
    assert {error["code"] for error in told["errors"]} == {"PL100", "PL101"}
    assert told["error"] == told["errors"][0]


@pytest.mark.parametrize(
    ("error", "exit_code", "words"),
    [
        (PacelineError("PL999", saw="A.", rule="B.", fix="C."), 2, "paceline: A. B. C. [PL999]\n"),
        (RankFailed(3, 1, "Traceback\nValueError: torn"), 1, "rank 3 failed first: ValueError: torn"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_how_a_command_ends(
    error: BaseException,
    exit_code: int,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    end_with(error, monkeypatch)
    handler = signal.getsignal(signal.SIGINT)
    assert main(["explain"]) == exit_code
    assert words in capsys.readouterr().err
    assert signal.getsignal(signal.SIGINT) == handler  # the caller's


@pytest.mark.parametrize("error", [ZeroDivisionError(), BrokenPipeError()])
def test_our_own_errors_keep_their_traceback(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    end_with(error, monkeypatch)
    with pytest.raises(type(error)):
        main(["explain"])


def test_a_reader_who_left_is_no_error() -> None:
    """As in `paceline explain | head -1`."""
    command = [sys.executable, "-m", "paceline", "explain"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(30) == 0


def end_with(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(args: object) -> int:
        raise error

    monkeypatch.setattr(explain, "run", fail)


@pytest.mark.parametrize("written", ["PL101", "pl101", "[PL101]"])
def test_explain_prints_the_page(written: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", written]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"PL101  {read_pages()['PL101'].title}\n")
    flat = " ".join(text.split())
    assert " ".join(read_pages()["PL101"].why.split()) in flat
    assert " ".join(read_pages()["PL101"].fix.split()) in flat


def test_explain_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "PL101", "--json"]) == 0
    page = read_pages()["PL101"]
    expected = {
        "code": "PL101",
        "title": page.title,
        "why": page.why,
        "fix": page.fix,
        "example": page.example,
    }
    assert json.loads(capsys.readouterr().out) == expected
    assert main(["explain", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {code: page.title for code, page in read_pages().items()}


def test_explain_lists_all_codes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(read_pages())


def test_explain_of_an_unknown_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "PL1011"]) == 2
    message = capsys.readouterr().err
    assert "'PL1011'" in message
    assert "Did you mean PL1" in message
    assert main(["explain", "wheel"]) == 2
    assert "lists all" in capsys.readouterr().err


def test_import_paceline_imports_no_torch() -> None:
    code = f"import sys, paceline; print(*[name for name in {HEAVY!r} if name in sys.modules])"
    assert run("-c", code, check=True).stdout.split() == []


@pytest.mark.parametrize("name", paceline.__all__)
def test_every_name_is_there_each_time(name: str) -> None:
    first = getattr(paceline, name)
    assert getattr(paceline, name) is first
    assert name in dir(paceline)


@pytest.mark.parametrize("name", ["launch", "verify", "start", "load_recipe"])
def test_a_function_shows_its_parameters_and_its_help(name: str) -> None:
    function = getattr(paceline, name)
    assert inspect.isfunction(function)
    assert all(p.kind is not p.VAR_POSITIONAL for p in inspect.signature(function).parameters.values())
    shown = pydoc.render_doc(function, renderer=pydoc.plaintext)
    assert f"{name}(" in shown
    assert function.__doc__.strip().splitlines()[0] in shown


def test_launch_can_be_called_whatever_was_imported_before() -> None:
    """No package has its name, which importing would put in its place."""
    code = """
import sys
import paceline
first = "paceline.launching.local" in sys.argv and __import__("paceline.launching.local")
for _ in range(2):
    try:
        paceline.launch(print, nproc=0)
    except paceline.PacelineError as error:
        print(error.code, error.saw)
"""
    for words in ([], ["paceline.launching.local"]):
        lines = run("-c", code, *words, check=True).stdout.splitlines()
        assert len(lines) == 2
        assert all("nproc=0" in line for line in lines)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Trainerr'"):
        _ = paceline.Trainerr
    with pytest.raises(ImportError):
        importlib.import_module("paceline.nothing")


def test_a_linux_without_proc_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    is_folder = os.path.isdir
    monkeypatch.setattr("os.path.isdir", lambda path: path != "/proc/self" and is_folder(path))
    assert main(["train", "recipe.toml"]) == 2
    assert "[PL385]" in capsys.readouterr().err
    assert main(["explain", "PL385"]) == 0


def test_a_shell_completes_commands_and_options() -> None:
    pytest.importorskip("shtab")
    script = subprocess.run(
        [sys.executable, "-m", "paceline", "completion", "bash"], capture_output=True, text=True, timeout=60
    )
    assert script.returncode == 0
    asks = 'COMP_WORDS=(paceline tr); COMP_CWORD=1; _shtab_paceline; echo "${COMPREPLY[@]}"'
    words = subprocess.run(
        ["bash", "-c", f"{script.stdout}\n{asks}"], capture_output=True, text=True, timeout=60
    )
    assert words.stdout.split() == ["train"]


def test_another_system_is_named_at_the_import() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import sys; sys.platform = 'darwin'; import paceline"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stderr.splitlines()[-1].startswith("ImportError: Paceline runs on Linux, and this is darwin")
