"""Writes the report and the pictures of docs/profile.md: of a job with a slow loader, and of two recipes.

python docs/render_profile.py            # docs/tables/profile.txt and the pictures docs/pictures/profile*.svg
python docs/render_profile.py recipes    # the pictures of the recipes only
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

from generate import quote_tables

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "examples" / "profile" / "slow_loader.py"
# By picture: the recipe, and how long it trains.
RECIPES = {
    "profile-resnet": ("resnet-digits", "train.epochs=1"),
    "profile-gpt": ("gpt-stdlib", "train.steps=20"),
}


def draw_recipe(name: str, recipe: str, setting: str) -> None:
    """Record ten steps of a recipe on two ranks, and write the timelines of the median one."""
    paceline = [sys.executable, "-m", "paceline"]
    with tempfile.TemporaryDirectory() as folder:
        traces, page = str(Path(folder) / "traces"), Path(folder) / "page.html"
        command = [
            *paceline,
            "train",
            str(ROOT / "recipes" / f"{recipe}.toml"),
            "--nproc",
            "2",
            "--out",
            "run",
        ]
        command += ["--set", setting, "--profile", traces, "--profile-steps", "10"]
        subprocess.run(command, cwd=folder, check=True, capture_output=True)
        read = [*paceline, "profile", "read", traces, "--html", str(page)]
        subprocess.run(read, check=False, capture_output=True, cwd=ROOT)
        picture = re.findall(r"<svg.*?</svg>", page.read_text(encoding="utf-8"), re.S)[0]
    (ROOT / "docs" / "pictures" / f"{name}.svg").write_text(picture + "\n", encoding="utf-8")


def main() -> None:
    for name, (recipe, setting) in RECIPES.items():
        draw_recipe(name, recipe, setting)
    if sys.argv[1:] == ["recipes"]:
        return
    paceline = [sys.executable, "-m", "paceline"]
    with tempfile.TemporaryDirectory() as name:
        traces = str(Path(name) / "traces")
        command = [*paceline, "profile", "--nproc-per-node", "2", "--out", traces, str(SCRIPT)]
        subprocess.run(command, cwd=name, check=True, capture_output=True)
        # Exit code 1: it has a finding.
        page = Path(name) / "page.html"
        read = [*paceline, "profile", "read", traces, "--html", str(page)]
        done = subprocess.run(read, capture_output=True, text=True, check=False, cwd=ROOT)
        picture = re.findall(r"<svg.*?</svg>", page.read_text(encoding="utf-8"), re.S)[0]
    if done.returncode != 1:
        raise SystemExit(done.stderr)
    docs = ROOT / "docs"
    (docs / "tables" / "profile.txt").write_text(done.stdout, encoding="utf-8")
    (docs / "pictures" / "profile.svg").write_text(picture + "\n", encoding="utf-8")
    guide = docs / "profile.md"
    tables = {"tables/profile.txt": done.stdout}
    guide.write_text(quote_tables(guide.read_text(encoding="utf-8"), tables), encoding="utf-8")


if __name__ == "__main__":
    main()
