"""Each library that training does not need may be missing: one message names it and how to install it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.cli.main import main
from paceline.errors import PacelineError
from paceline.huggingface.export import export_folder
from paceline.huggingface.factory import from_recipe
from paceline.recipe.hf_model import HfModel
from paceline.sinks.sink import build_sinks


def complete(folder: Path) -> None:
    assert main(["completion", "bash"]) == 2


def import_yaml(folder: Path) -> None:
    (folder / "a.yaml").write_text("distributed_type: NO")
    assert main(["import", str(folder / "a.yaml")]) == 2


def build_hf(folder: Path) -> None:
    from_recipe(HfModel(kind="hf", folder=str(folder)), None)


def export_hf(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({"architectures": ["GPT2LMHeadModel"]}))
    export_folder(folder, folder / "out", folder)


@pytest.mark.parametrize(
    ("name", "use", "said"),
    [
        ("shtab", complete, "pip install 'paceline[completion]'"),
        ("yaml", import_yaml, "pip install 'pyyaml'"),
        ("transformers", build_hf, "pip install 'transformers'"),
        ("transformers", export_hf, "pip install 'transformers'"),
        ("wandb", lambda folder: build_sinks("wandb"), "pip install 'paceline[wandb]'"),
        ("mlflow", lambda folder: build_sinks(["csv", "mlflow"]), "pip install 'paceline[mlflow]'"),
    ],
)
def test_a_missing_library_is_named(
    name: str,
    use: Callable[[Path], object],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for module in [each for each in sys.modules if each == name or each == f"paceline.sinks.{name}"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, name, None)
    try:
        use(tmp_path)
    except PacelineError as error:
        print(error, file=sys.stderr)
    (line,) = capsys.readouterr().err.splitlines()
    assert name in line
    assert said in line
