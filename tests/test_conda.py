"""The conda recipe names the version, the command and the requirements of pyproject.toml."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]


def test_the_conda_recipe_is_that_of_the_project() -> None:
    yaml = pytest.importorskip("yaml", reason="PyYAML reads the recipe")
    recipe: Any = yaml.safe_load((ROOT / "conda" / "recipe.yaml").read_text(encoding="utf-8"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    own = project["project"]
    assert recipe["package"] == {"name": own["name"], "version": own["version"]}
    assert recipe["build"]["python"]["entry_points"] == [
        f"{name} = {place}" for name, place in own["scripts"].items()
    ]
    wanted = {each.replace("torch>", "pytorch>").lower() for each in own["dependencies"]}
    wanted |= {f"python{own['requires-python']}", "__linux"}
    assert {each.replace(" ", "") for each in recipe["requirements"]["run"]} == wanted
    host = {each.replace(" ", "") for each in recipe["requirements"]["host"]}
    assert host == {f"python{own['requires-python']}", "pip", *project["build-system"]["requires"]}
    assert recipe["about"]["summary"] == own["description"]
    assert recipe["about"]["license"] == own["license"]
    assert (ROOT / recipe["about"]["license_file"]).is_file()
