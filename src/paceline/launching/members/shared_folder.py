"""A witness in a folder that all nodes share: each entry is a file, and the first link to its name has it.

`link` is atomic on local disks and on NFS, other than exclusive creation on old versions of NFS.
"""

from __future__ import annotations

import os
import re
import secrets
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote

from paceline.launching.members.witness import (
    Entry,
    WitnessError,
    entry_from_text,
    entry_to_text,
    member_from_text,
    member_to_text,
)
from paceline.launching.members.world import Member

_ENTRY = re.compile(r"entry-(\d{8})\.json")


class SharedFolder:
    """The record of one job in a folder of its own.

    Args:
        folder: the folder of all jobs; made if it is not there.
        job: the job's name.
    """

    def __init__(self, folder: Path, job: str) -> None:
        self.name = str(folder)
        self._folder = folder / quote(job, safe="")

    def read(self) -> Entry | None:
        numbers = [int(found[1]) for name in self._list() if (found := _ENTRY.fullmatch(name))]
        if not numbers:
            return None
        try:
            return entry_from_text(self._path(max(numbers)).read_bytes())
        except OSError as error:
            raise _unreachable(error) from None

    def append(self, entry: Entry) -> bool:
        last = self.read()
        if entry.number != (0 if last is None else last.number) + 1:
            return False
        draft = self._write(f"draft-{secrets.token_hex(8)}", entry_to_text(entry))
        try:
            os.link(draft, self._path(entry.number))
        except FileExistsError:
            return False
        except OSError as error:
            raise _unreachable(error) from None
        finally:
            with suppress(OSError):
                draft.unlink()
        return True

    def register(self, member: Member) -> None:
        draft = self._write(f"draft-{member.key}", member_to_text(member))
        try:
            draft.replace(self._folder / f"launcher-{member.key}.json")
        except OSError as error:
            raise _unreachable(error) from None

    def unregister(self, member: Member) -> None:
        with suppress(OSError):
            (self._folder / f"launcher-{member.key}.json").unlink()

    def list_launchers(self) -> list[Member]:
        found = []
        for name in self._list():
            if name.startswith("launcher-"):
                with suppress(FileNotFoundError):
                    found.append(member_from_text((self._folder / name).read_bytes()))
        return found

    def _path(self, number: int) -> Path:
        return self._folder / f"entry-{number:08d}.json"

    def _list(self) -> list[str]:
        try:
            return sorted(os.listdir(self._folder))
        except FileNotFoundError:
            return []
        except OSError as error:
            raise _unreachable(error) from None

    def _write(self, name: str, text: str) -> Path:
        path = self._folder / name
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with path.open("w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise _unreachable(error) from None
        return path


def _unreachable(error: OSError) -> WitnessError:
    return WitnessError(error.strerror or str(error))
