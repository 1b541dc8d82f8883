"""The store of a job for `--rdzv-backend c10d`: torch's TCPStore, on the node of the endpoint.

The job ends with that node, as under torchrun. A call of torch's client may never return once the node is
gone, so each call runs in a thread that is given up after a while, together with its connection.
"""

from __future__ import annotations

import errno
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from paceline.launching.members.endpoints import Address
from paceline.launching.members.store import StoreError

_T = TypeVar("_T")
# A link of 0.2 s takes 2 s to connect.
_CALL_S = 4.0
_TIMEOUT = timedelta(seconds=_CALL_S)
_CONNECT_S = 10.0
_FEW = 3
_NO_VALUE = "?"


class TcpRecord:
    """The store of one job in a TCPStore.

    Attributes:
        is_host: whether this launcher serves the store.

    Args:
        address: this node's, as the others reach it, where it may serve the store; `None` elsewhere.
    """

    def __init__(self, place: Address, job: str, address: str | None) -> None:
        self.name = f"{place[0]}:{place[1]}"
        self._place, self._prefix = place, f"paceline/{job}"
        self._client: TCPStore | None = None
        self._is_stranger = self._had_record = False
        if address is not None:
            self._client = _serve(place, address)
        self.is_host = self._client is not None

    def beat(self, key: str, value: str) -> None:
        self._call(lambda client: _set(client, f"{self._prefix}/beats/{key}", value))

    def read_beats(self, keys: Sequence[str]) -> list[bytes | None]:
        names = [f"{self._prefix}/beats/{key}" for key in keys]

        def read(client: Any) -> list[bytes | None]:
            if len(names) > _FEW and client.check(names):
                return [bytes(value) or None for value in client.multi_get(names)]
            return [_get(client, name) or None for name in names]

        return self._call(read) if names else []

    def end_beats(self, key: str) -> None:
        self._call(lambda client: _set(client, f"{self._prefix}/beats/{key}", ""))

    def read(self) -> bytes | None:
        found = self._call(lambda client: _get(client, self._prefix))
        if found is None and self._had_record:
            raise StoreError("its launcher was started again, without the state of the job", is_final=True)
        self._had_record |= found is not None
        return found

    def replace(self, number: int, before: bytes | None, after: str) -> bool:
        old = "" if before is None else before.decode()
        return bool(self._call(lambda client: client.compare_set(self._prefix, old, after)) == after.encode())

    def _call(self, call: Callable[[Any], _T]) -> _T:
        """Call a function with a connected client.

        Raises:
            StoreError: it did not answer in time.
        """
        found: list[_T] = []
        errors: list[Exception] = []

        def work() -> None:
            try:
                if self._client is None:
                    self._client = self._connect()
                found.append(call(self._client))
            except Exception as error:
                errors.append(error)

        limit_s = _CALL_S if self._client is not None else _CONNECT_S
        thread = threading.Thread(target=work, name="paceline-store", daemon=True)
        thread.start()
        thread.join(limit_s)
        if found:
            return found[0]
        if not self.is_host:
            self._client = None
        if self._is_stranger:
            why = "what listens there does not answer as the store of a job"
            raise StoreError(why, is_final=not self._had_record)
        raise StoreError(str(errors[0]).splitlines()[0] if errors else f"no answer for {limit_s:g} s")

    def _connect(self) -> TCPStore:
        self._is_stranger = False
        # torch itself tries again for a long time, and never returns where nothing answers.
        with socket.create_connection(self._place, _CALL_S):
            self._is_stranger = True
        client = TCPStore(*self._place, is_master=False, wait_for_workers=False, timeout=_TIMEOUT)
        self._is_stranger = False
        return client


def _get(client: Any, key: str) -> bytes | None:
    """Return a value, by one message there and back; torch's `get` needs two, and awaits a missing key."""
    found = bytes(client.compare_set(key, _NO_VALUE, _NO_VALUE))
    return None if found == _NO_VALUE.encode() else found


def _set(client: Any, key: str, value: str) -> None:
    """Store a value; torch's `set` alone returns as soon as the message is on its way."""
    client.set(key, value)
    client.check([key])


def _serve(place: Address, address: str) -> TCPStore | None:
    """Serve the store at a place of this node; return None if another process has its port.

    Of several launchers on this machine, the first to take the port has it.
    """
    # Other nodes may know this one under another address than it does itself.
    host = address if _resolve(place[0]) == _resolve(address) else ("::" if ":" in _resolve(place[0]) else "")
    family = socket.AF_INET6 if ":" in _resolve(host or "0.0.0.0") else socket.AF_INET
    try:
        with socket.create_server((host, place[1]), family=family, backlog=512) as server:
            port = int(server.getsockname()[1])
            return TCPStore(
                *(place[0], port),
                is_master=True,
                wait_for_workers=False,
                timeout=_TIMEOUT,
                master_listen_fd=server.detach(),
            )
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
    return None


def _resolve(host: str) -> str:
    with suppress(OSError):
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        return str(sorted(found, key=lambda entry: entry[0] != socket.AF_INET)[0][4][0])
    return host
