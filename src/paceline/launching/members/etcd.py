"""A witness in etcd 3.4 or later, over the JSON gateway of its v3 interface: no client library is needed.

The calls are `/v3/kv/range`, `/v3/kv/put`, `/v3/kv/deleterange` and `/v3/kv/txn` of etcd's documentation
("gRPC gateway"), with keys and values in base64. One transaction compares the last entry and replaces it.
"""

from __future__ import annotations

import base64
import json
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import Any

from paceline.launching.members.endpoints import read_endpoints
from paceline.launching.members.witness import (
    Entry,
    WitnessError,
    entry_from_text,
    entry_to_text,
    member_from_text,
    member_to_text,
)
from paceline.launching.members.world import Member

DEFAULT_PORT = 2379
_TIMEOUT_S = 2.0
# Without the environment's proxies: the servers of a cluster are not behind one.
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class Etcd:
    """The record of one job in a cluster of etcd servers.

    Args:
        servers: as `http://HOST:PORT`; the first that answers is used.
        job: the job's name.
    """

    def __init__(self, servers: Sequence[str], job: str) -> None:
        self.name = ",".join(servers)
        self._servers = list(servers)
        self._entry_key = f"paceline/{job}/entry"
        self._launchers = f"paceline/{job}/launchers/"

    def read(self) -> Entry | None:
        stored = self._read_entry()
        return None if stored is None else entry_from_text(stored)

    def append(self, entry: Entry) -> bool:
        stored = self._read_entry()
        last = 0 if stored is None else entry_from_text(stored).number
        if entry.number != last + 1:
            return False
        key = _encode(self._entry_key)
        if stored is None:
            compare = {"key": key, "target": "CREATE", "result": "EQUAL", "create_revision": "0"}
        else:
            compare = {"key": key, "target": "VALUE", "result": "EQUAL", "value": _encode(stored)}
        put = {"requestPut": {"key": key, "value": _encode(entry_to_text(entry))}}
        return bool(self._call("txn", {"compare": [compare], "success": [put]}).get("succeeded", False))

    def register(self, member: Member) -> None:
        key = _encode(self._launchers + member.key)
        self._call("put", {"key": key, "value": _encode(member_to_text(member))})

    def unregister(self, member: Member) -> None:
        self._call("deleterange", {"key": _encode(self._launchers + member.key)})

    def list_launchers(self) -> list[Member]:
        end = self._launchers[:-1] + chr(ord(self._launchers[-1]) + 1)
        found = self._call("range", {"key": _encode(self._launchers), "range_end": _encode(end)})
        return [member_from_text(base64.b64decode(pair["value"])) for pair in found.get("kvs", [])]

    def _read_entry(self) -> bytes | None:
        pairs = self._call("range", {"key": _encode(self._entry_key)}).get("kvs", [])
        return base64.b64decode(pairs[0]["value"]) if pairs else None

    def _call(self, name: str, body: dict[str, Any]) -> dict[str, Any]:
        """Call the first server that answers.

        Raises:
            WitnessError: none does.
        """
        troubles = []
        for server in list(self._servers):
            request = urllib.request.Request(
                f"{server}/v3/kv/{name}",
                data=json.dumps(body).encode(),
                headers={"Content-Type": "application/json"},
            )
            try:
                with _opener.open(request, timeout=_TIMEOUT_S) as answer:
                    found = json.loads(answer.read())
                if not isinstance(found, dict):
                    raise ValueError("not an object")
            except urllib.error.HTTPError as error:
                error.close()
                why = f"HTTP {error.code}"
                if error.code == 404:
                    why = "it has no v3 interface: an etcd older than 3.4, or no etcd"
                troubles.append(f"{server}: {why}")
            except (OSError, ValueError) as error:
                troubles.append(f"{server}: {getattr(error, 'reason', error) or type(error).__name__}")
            else:
                # The next call asks the one that has answered.
                self._servers.remove(server)
                self._servers.insert(0, server)
                return found
        raise WitnessError("; ".join(troubles))


def list_servers(hosts: str, scheme: str = "http") -> list[str]:
    """Return the addresses of servers such as `etcd0:2379,etcd1`.

    Raises:
        PacelineError: PL377 for a port that is none.
    """
    places = read_endpoints(hosts, DEFAULT_PORT)
    return [f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}" for host, port in places]


def _encode(text: str | bytes) -> str:
    return base64.b64encode(text.encode() if isinstance(text, str) else text).decode()
