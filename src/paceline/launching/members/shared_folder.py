"""A store in a folder that all nodes share: each record is a file, and the first link to its name has it.

`link` is atomic on local disks and on NFS, also where locks are not seen by other nodes. An NFS client may
keep an old listing of a folder, until it changes the folder itself; launchers write their beats there.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote

from paceline.launching.members.record import MOST_BYTES
from paceline.launching.members.store import StoreError

_RECORD = re.compile(r"record-(\d{8})\.json")


class SharedFolder:
    """The store of one job, in a folder of its own.

    Args:
        folder: the folder of all jobs; made if it is not there.
    """

    def __init__(self, folder: Path, job: str) -> None:
        self.name = str(folder)
        self._folder = folder / quote(job, safe="")
        self._draft = f"draft-{secrets.token_hex(8)}"

    def beat(self, key: str, value: str) -> None:
        draft = self._write(f"beat-{key}.new", value, is_durable=False)
        try:
            draft.replace(self._folder / f"beat-{key}")
        except OSError as error:
            raise _unreachable(error) from None

    def read_beats(self, keys: Sequence[str]) -> list[bytes | None]:
        return [self._read(f"beat-{key}") for key in keys]

    def end_beats(self, key: str) -> None:
        with suppress(OSError):
            (self._folder / f"beat-{key}").unlink()

    def read(self) -> bytes | None:
        try:
            names = os.listdir(self._folder)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise _unreachable(error) from None
        found = max((name for name in names if _RECORD.fullmatch(name)), default=None)
        return None if found is None else self._read(found)

    def replace(self, number: int, before: bytes | None, after: str) -> bool:
        draft = self._write(self._draft, after, is_durable=True)
        try:
            os.link(draft, self._folder / f"record-{number:08d}.json")
        except FileExistsError:
            return False
        except OSError as error:
            raise _unreachable(error) from None
        finally:
            with suppress(OSError):
                draft.unlink()
        return True

    def _read(self, name: str) -> bytes | None:
        try:
            with (self._folder / name).open("rb") as file:
                return file.read(MOST_BYTES + 1)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise _unreachable(error) from None

    def _write(self, name: str, text: str, *, is_durable: bool) -> Path:
        path = self._folder / name
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with path.open("w", encoding="utf-8") as file:
                file.write(text)
                if is_durable:
                    file.flush()
                    os.fsync(file.fileno())
        except OSError as error:
            raise _unreachable(error) from None
        return path


def _unreachable(error: OSError) -> StoreError:
    return StoreError(error.strerror or str(error))
