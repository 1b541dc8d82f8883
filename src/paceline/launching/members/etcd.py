"""A store in etcd 3.4 or later, over the JSON gateway of its v3 interface: no client library is needed.

The calls are `/v3/kv/range`, `/v3/kv/put`, `/v3/kv/deleterange` and `/v3/kv/txn` of etcd's documentation
("gRPC gateway"), with keys and values in base64. One transaction compares the record and replaces it.

With TLS, a server's certificate must be signed by an authority that Python trusts (`SSL_CERT_FILE`,
`SSL_CERT_DIR`) or by one of the file that etcdctl's `ETCDCTL_CACERT` names. `ETCDCTL_CERT` and `ETCDCTL_KEY`
are this launcher's own.
"""

from __future__ import annotations

import base64
import http.client
import json
import os
import ssl
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import Any

from paceline.errors import PacelineError
from paceline.launching.members.endpoints import read_endpoints
from paceline.launching.members.store import StoreError

DEFAULT_PORT = 2379
# Longer than an answer takes, and so short that a lost packet does not cost several beats.
_TIMEOUT_S = 1.0
_MOST_BYTES = 1 << 26
_CA, _CERT, _KEY = "ETCDCTL_CACERT", "ETCDCTL_CERT", "ETCDCTL_KEY"


class Etcd:
    """The store of one job in a cluster of etcd servers.

    Args:
        servers: as `http://HOST:PORT`; the first that answers is used.
    """

    def __init__(self, servers: Sequence[str], job: str) -> None:
        # Without the environment's proxies: the servers of a cluster are not behind one.
        handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
        if any(server.startswith("https:") for server in servers):
            handlers.append(urllib.request.HTTPSHandler(context=_read_certificates()))
        self._opener = urllib.request.build_opener(*handlers)
        self.name = ",".join(servers)
        self._servers = list(servers)
        self._record = f"paceline/{job}/record"
        self._beats = f"paceline/{job}/beats/"

    def beat(self, key: str, value: str) -> None:
        self._call("put", {"key": _encode(self._beats + key), "value": _encode(value)})

    def read_beats(self, keys: Sequence[str]) -> list[bytes | None]:
        if not keys:
            return []
        end = self._beats[:-1] + chr(ord(self._beats[-1]) + 1)
        pairs = self._call("range", {"key": _encode(self._beats), "range_end": _encode(end)}).get("kvs", [])
        found = {base64.b64decode(pair["key"]): base64.b64decode(pair.get("value", "")) for pair in pairs}
        return [found.get((self._beats + key).encode()) for key in keys]

    def end_beats(self, key: str) -> None:
        self._call("deleterange", {"key": _encode(self._beats + key)})

    def read(self) -> bytes | None:
        pairs = self._call("range", {"key": _encode(self._record)}).get("kvs", [])
        return base64.b64decode(pairs[0]["value"]) if pairs else None

    def replace(self, number: int, before: bytes | None, after: str) -> bool:
        key = _encode(self._record)
        if before is None:
            compare = {"key": key, "target": "CREATE", "result": "EQUAL", "create_revision": "0"}
        else:
            compare = {"key": key, "target": "VALUE", "result": "EQUAL", "value": _encode(before)}
        put = {"requestPut": {"key": key, "value": _encode(after)}}
        return bool(self._call("txn", {"compare": [compare], "success": [put]}).get("succeeded", False))

    def _call(self, name: str, body: dict[str, Any]) -> dict[str, Any]:
        """Call the first server that answers.

        Raises:
            StoreError: none does.
        """
        troubles, codes = [], []
        for server in list(self._servers):
            request = urllib.request.Request(
                f"{server}/v3/kv/{name}",
                data=json.dumps(body).encode(),
                headers={"Content-Type": "application/json"},
            )
            try:
                with self._opener.open(request, timeout=_TIMEOUT_S) as answer:
                    found = json.loads(answer.read(_MOST_BYTES))
                if not isinstance(found, dict):
                    raise ValueError("not an object")
            except urllib.error.HTTPError as error:
                error.close()
                codes.append(error.code)
                why = f"HTTP {error.code}"
                if error.code == 404:
                    why = "it has no v3 interface: it is an etcd older than 3.4, or no etcd"
                troubles.append(f"{server}: {why}")
            except (OSError, ValueError, RecursionError, http.client.HTTPException) as error:
                codes.append(0)
                troubles.append(f"{server}: {getattr(error, 'reason', error) or type(error).__name__}")
            else:
                # The next call asks the one that has answered.
                self._servers.remove(server)
                self._servers.insert(0, server)
                return found
        raise StoreError("; ".join(troubles), is_final=all(code == 404 for code in codes))


def list_servers(hosts: str, scheme: str = "http") -> list[str]:
    """Return the addresses of servers such as `etcd0:2379,etcd1`."""
    places = read_endpoints(hosts, DEFAULT_PORT)
    return [f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}" for host, port in places]


def _read_certificates() -> ssl.SSLContext:
    names = {name: os.environ.get(name, "") for name in (_CA, _CERT, _KEY)}
    saw = "; ".join(f"{name}={value}" for name, value in names.items() if value)
    try:
        context = ssl.create_default_context()
        if names[_CA]:
            context.load_verify_locations(names[_CA])
        if names[_CERT] or names[_KEY]:
            if not (names[_CERT] and names[_KEY]):
                raise ValueError(f"one of {_CERT} and {_KEY} is missing")
            context.load_cert_chain(names[_CERT], names[_KEY])
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        raise PacelineError(
            "PL384",
            saw=f"{saw or 'The certificates'}: {getattr(error, 'strerror', None) or error}.",
            rule=f"{_CA} names a file with the certificates of authorities, and {_CERT} and {_KEY} this "
            "node's certificate and key, in PEM.",
            fix="Correct the path, or unset the variable; Python's own authorities are used too.",
        ) from None
    return context


def _encode(text: str | bytes) -> str:
    return base64.b64encode(text.encode() if isinstance(text, str) else text).decode()
