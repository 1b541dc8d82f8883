"""Saves and keeps a run's checkpoints; `commit.py` has the order of a save's steps."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from paceline.checkpoint.commit import Commits
from paceline.checkpoint.content import PreparedShare, write_files
from paceline.checkpoint.manifest import BadManifestError, OtherFormatError, read_manifest


class CheckpointFolder(Commits):
    """The checkpoints of one run, under `run_folder/checkpoints`.

    Args:
        run_folder: the run's folder; made at the first save.
        keep: how many valid checkpoints stay, at least 1.
        generation, best, check: as for `Commits`.
    """

    def list_runs(self) -> dict[Path, str]:
        """Return the id of the run that wrote each checkpoint, if its manifest is readable and has one."""
        found = {}
        for path in self.steps().values():
            with contextlib.suppress(BadManifestError, OtherFormatError):
                run = read_manifest(path).identity.get("run")
                if isinstance(run, str):
                    found[path] = run
        return found

    def save(self, step: int, content: PreparedShare, *, identity: dict[str, Any]) -> Path:
        """Commit a checkpoint that this process alone writes, and remove those that need not be kept.

        On return it is on the disk. On any error, a full disk or Ctrl-C included, the earlier
        checkpoints are as they were and nothing of the new one is left. Only one process calls it.

        Args:
            step: optimizer steps taken.
            content: all of the state, as `prepare_whole` returns it.
            identity: of `describe_identity`; whatever else is in it must be fit for JSON.

        Returns:
            The checkpoint's folder.

        Raises:
            PacelineError: PL508 where the file system refuses, PL510 where another process is saving here,
                PL383 where a newer start of the run has begun, PL504 where a newer Paceline's checkpoint of
                this step is there.
        """
        with self.begin(step, num_bytes=content.num_bytes, identity=identity) as save:
            return save.commit(write_files(content.list_files(), save.folder))
