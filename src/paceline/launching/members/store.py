"""The store of a job's record, outside of the launchers: one text that is only replaced by comparison.

Beside the record, each launcher has a beat there, which only this launcher writes. `etcd.py` and
`shared_folder.py` implement stores; that of `c10d` is `elastic/tcp_record.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class StoreError(Exception):
    """Raised if a store cannot be reached, or gives an invalid answer.

    Attributes:
        is_final: whether asking again does not help: it is no store, or its content is lost.
    """

    def __init__(self, text: str, *, is_final: bool = False) -> None:
        super().__init__(text)
        self.is_final = is_final


class Store(Protocol):
    """The store of one job; every method may wait for seconds, and raises `StoreError`."""

    @property
    def name(self) -> str:
        """The place, as the user named it."""

    def beat(self, key: str, value: str) -> None:
        """Store the beat of a launcher."""

    def read_beats(self, keys: Sequence[str]) -> list[bytes | None]:
        """Return the beats of launchers, `None` for those without one."""

    def end_beats(self, key: str) -> None:
        """Remove the beat of a launcher."""

    def read(self) -> bytes | None:
        """Return the record, `None` if there is none."""

    def replace(self, number: int, before: bytes | None, after: str) -> bool:
        """Replace the record if it still is `before`; return whether it was.

        Args:
            number: of the new record, one more than that of `before`.
            before: the record as read; `None` if there was none.
        """
