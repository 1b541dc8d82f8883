"""The facts that the launcher reads from a script's text before it starts ranks."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import timeit
from pathlib import Path

import pytest

from paceline.launching.rank.script import Script
from paceline.launching.warm.sources import choose_modules, find_settings, find_shadowed

assert platform.__file__
assert timeit.__file__, "both are loaded, and may be shadowed"


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TORCH_SHOW_CPP_STACKTRACES", "MKL_NUM_THREADS", "TORCH_LOGS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")


def write(folder: Path, text: str, name: str = "train.py") -> Script:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return Script(str(path))


# ---- what is imported ahead


def test_torch_and_its_distributed_part_come_always(tmp_path: Path) -> None:
    assert choose_modules(write(tmp_path, "print(1)\n")) == ["torch", "torch.distributed"]


@pytest.mark.parametrize(
    "text",
    [
        "import torch\nopt = torch.optim.SGD([], lr=1)\n",
        "from torch import optim\n",
        "from torch.optim import AdamW\n",
        "from torch.nn.parallel import DistributedDataParallel as DDP\n",
        "import torch\nf = torch.compile(len)\n",
        "from torch.distributed.fsdp import fully_shard\n",
        "import accelerate\n",
        "import lightning\n",
    ],
)
def test_what_will_need_dynamo_has_it(text: str, tmp_path: Path) -> None:
    assert "torch._dynamo" in choose_modules(write(tmp_path, text))


def test_words_that_only_look_alike_do_not(tmp_path: Path) -> None:
    text = "options = 1\ncompiled = 2\nimport torch.nn\n"
    assert "torch._dynamo" not in choose_modules(write(tmp_path, text))


@pytest.mark.parametrize(
    "setting",
    [
        'os.environ["TORCHDYNAMO_VERBOSE"] = "1"',
        'os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", "x")',
        'os.environ.update({"TORCH_COMPILE_DEBUG": "1"})',
    ],
)
def test_a_script_that_sets_up_dynamo_imports_it_itself(
    setting: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # torch._dynamo sets it where it is not set, and another test may have imported that.
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    assert choose_modules(write(tmp_path, f"import os\n{setting}\nfrom torch import optim\n"))[2:] == []


@pytest.mark.parametrize("text", ["import torch.nn\nprint 'old'\n", "\0", "import torch.nn\n\xff"])
def test_what_can_not_be_read_is_left_to_python(text: str, tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_bytes(text.encode("latin-1"))
    assert choose_modules(Script(str(path))) == ["torch", "torch.distributed"]
    assert find_settings(Script(str(path))) == []


@pytest.mark.parametrize("script", [Script("no/such.py"), Script("no.such.module", is_module=True)])
def test_missing_files_are_harmless(script: Script) -> None:
    assert choose_modules(script) == ["torch", "torch.distributed"]
    assert find_settings(script) == []


def test_a_folder_with_a_main(tmp_path: Path) -> None:
    write(tmp_path, 'import os, torch.optim\nos.environ["MKL_NUM_THREADS"] = "1"\n', "app/__main__.py")
    script = Script(str(tmp_path / "app"))
    assert "torch._dynamo" in choose_modules(script)
    assert find_settings(script) == ["MKL_NUM_THREADS"]


# ---- settings that come too late for a warm start


@pytest.mark.parametrize(
    "line",
    [
        'os.environ["MKL_NUM_THREADS"] = "1"',
        'os.environ["MKL_NUM_THREADS"] = str(n)',
        'environ["MKL_NUM_THREADS"] = "1"',
        'a = os.environ["MKL_NUM_THREADS"] = "1"',
        'os.environ.setdefault("MKL_NUM_THREADS", "1")',
        'os.environ.update({"A": "1", "MKL_NUM_THREADS": "1"})',
        'os.environ.update(MKL_NUM_THREADS="1")',
        'os.environ.update(dict(A="2"), MKL_NUM_THREADS="1")',
        'os.putenv("MKL_NUM_THREADS", "1")',
        'if x:\n    def f():\n        os.environ["MKL_NUM_THREADS"] = "1"',
    ],
)
def test_each_way_of_setting(line: str, tmp_path: Path) -> None:
    assert find_settings(write(tmp_path, f"import os\n{line}\n")) == ["MKL_NUM_THREADS"]


@pytest.mark.parametrize(
    "line",
    [
        'del os.environ["OMP_NUM_THREADS"]',
        'os.environ.pop("OMP_NUM_THREADS")',
        'os.environ.pop("OMP_NUM_THREADS", None)',
        'os.unsetenv("OMP_NUM_THREADS")',
        'os.environ["OMP_NUM_THREADS"] = "3"',
    ],
)
def test_taking_one_away_is_setting_it(line: str, tmp_path: Path) -> None:
    assert find_settings(write(tmp_path, f"import os\n{line}\n")) == ["OMP_NUM_THREADS"]


@pytest.mark.parametrize(
    "line",
    [
        'os.environ["MASTER_ADDR"] = "localhost"',
        'os.environ["CUDA_VISIBLE_DEVICES"] = "0"',
        'print(os.environ["MKL_NUM_THREADS"], os.environ.get("MKL_NUM_THREADS"))',
        'settings["MKL_NUM_THREADS"] = "1"',
        "os.environ[name] = value",
        "os.environ.update(others)",
        "os.environ.update(**others)",
        'os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"',
        'os.environ["TORCH_LOGS"] = "dynamo"',
        'os.environ["OPENBLAS_NUM_THREADS"] = "1"',
        'os.environ["TMPDIR"] = "/tmp"',
    ],
)
def test_what_does_not_stand_against_a_warm_start(line: str, tmp_path: Path) -> None:
    """Read when used, or applied again, or not told by the text."""
    assert find_settings(write(tmp_path, f"import os\n{line}\n")) == []


def test_variables_of_tqdm_go_by_their_prefix(tmp_path: Path) -> None:
    text = 'import os\nos.environ["TQDM_MININTERVAL"] = "5"\nos.environ["TORCH_SHOW_CPP_STACKTRACES"] = "1"\n'
    assert find_settings(write(tmp_path, text)) == ["TORCH_SHOW_CPP_STACKTRACES", "TQDM_MININTERVAL"]


@pytest.mark.parametrize("place", ["tool.py", "tool/__main__.py", "deep/tool.py"])
def test_settings_of_a_module(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, 'import os\nos.environ["MKL_NUM_THREADS"] = "1"\n', place)
    name = place.removesuffix("/__main__.py").removesuffix(".py").replace("/", ".")
    assert find_settings(Script(name, is_module=True)) == ["MKL_NUM_THREADS"]


def test_a_module_elsewhere_on_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    write(tmp_path, "import os, torch.optim\nos.environ['MKL_NUM_THREADS'] = '1'\n", "site/far_tool.py")
    script = Script("far_tool", is_module=True)
    assert find_settings(script) == ["MKL_NUM_THREADS"]
    assert "torch._dynamo" in choose_modules(script)


# ---- modules of the standard library that the script has its own of


def test_modules_beside_the_script_that_are_loaded_here(tmp_path: Path) -> None:
    for name in ("timeit.py", "nothing_of_ours.py", "helper.txt", "notes"):
        write(tmp_path, "", name)
    write(tmp_path, "", "platform/__init__.py")
    assert find_shadowed(write(tmp_path, "")) == ["platform", "timeit"]


def test_what_does_not_shadow(tmp_path: Path) -> None:
    """A folder that is no package, built-in and frozen modules, and what is deeper."""
    for name in ("platform/notes.txt", "sys.py", "os.py", "pack/timeit.py", "other.py"):
        write(tmp_path, "", name)
    assert find_shadowed(write(tmp_path, "")) == []


def test_the_folder_counts_where_the_script_really_lies(tmp_path: Path) -> None:
    write(tmp_path, "", "real/timeit.py")
    write(tmp_path, "", "real/train.py")
    (tmp_path / "link.py").symlink_to(tmp_path / "real" / "train.py")
    assert find_shadowed(Script(str(tmp_path / "link.py"))) == ["timeit"]


def test_of_a_module_it_is_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "", "timeit.py")
    write(tmp_path, "", "pack/platform.py")
    monkeypatch.chdir(tmp_path)
    assert find_shadowed(Script("pack.train", is_module=True)) == ["timeit"]


def test_of_a_folder_it_is_the_folder_itself(tmp_path: Path) -> None:
    write(tmp_path, "", "timeit.py")
    write(tmp_path, "", "app/platform.py")
    write(tmp_path, "", "app/__main__.py")
    assert find_shadowed(Script(str(tmp_path / "app"))) == ["platform"]


def test_modules_that_were_loaded_from_there_do_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "", "loaded_from_here.py")
    monkeypatch.syspath_prepend(str(tmp_path))
    import loaded_from_here  # type: ignore[import-not-found]

    assert loaded_from_here.__file__
    assert find_shadowed(write(tmp_path, "")) == []
    del sys.modules["loaded_from_here"]


def test_missing_folders_are_harmless() -> None:
    assert find_shadowed(Script("no/such/train.py")) == []


def test_a_module_that_only_dynamo_loads_is_the_scripts_own(tmp_path: Path) -> None:
    """It is loaded after the first look, by the keeper."""
    write(tmp_path, "", "statistics.py")
    write(tmp_path, "import statistics\nprint('from', statistics.__file__)\nfrom torch import optim\n")
    done = subprocess.run(
        [str(Path(sys.executable).with_name("paceline")), "run", "train.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert f"from {tmp_path / 'statistics.py'}\n" in done.stdout
