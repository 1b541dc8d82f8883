"""Writes a rendered file, and hands it to sbatch or kubectl."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from paceline.errors import PacelineError

_SUBMIT_S = 60.0
_INSTALL = {
    "sbatch": "Run it on a login node of the cluster, or copy the file there and run sbatch.",
    "kubectl": "Install kubectl, or copy the file to a machine that has it and run kubectl create -f.",
}


def write_rendered(path: Path, text: str, mark: str) -> None:
    """Write a file, in place of an older one only if that has the mark of a rendered file too."""
    try:
        if path.exists() and mark not in path.read_text(encoding="utf-8", errors="replace"):
            raise PacelineError(
                "PL371",
                saw=f"{path} exists, and `paceline launch` has not written it.",
                rule="Only a rendered file is replaced.",
                fix="Choose another name with --file.",
            )
        # For its owner alone, since a script's arguments may hold a password.
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise PacelineError(
            "PL371",
            saw=f"{path} cannot be written: {error.strerror}.",
            rule="The rendered file is written there.",
            fix="Choose another path with --file.",
        ) from None


def submit(program: str, args: list[str], path: Path) -> str:
    """Run `program ARGS... PATH`, and return what it printed."""
    if shutil.which(program) is None:
        raise PacelineError(
            "PL367",
            saw=f"{program} is not on this machine's PATH; {path} is written.",
            rule=f"--submit passes the file to {program}.",
            fix=_INSTALL[program],
        )
    try:
        done = subprocess.run(
            [program, *args, str(path)], capture_output=True, text=True, timeout=_SUBMIT_S, check=False
        )
        said, failed = (done.stderr or done.stdout).strip(), done.returncode != 0
    except (OSError, subprocess.TimeoutExpired) as error:
        said, failed = str(error), True
    if failed:
        raise PacelineError(
            "PL368",
            saw=f"{program} refused {path}: {said}.",
            rule="The job was not submitted.",
            fix="Correct the option that it names, and submit again.",
        )
    return done.stdout.strip()
