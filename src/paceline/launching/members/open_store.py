"""Opens the store that `--rdzv-backend etcd` or `folder` and `--rdzv-endpoint` name."""

from __future__ import annotations

from pathlib import Path

from paceline.errors import PacelineError
from paceline.launching.members.etcd import Etcd, list_servers
from paceline.launching.members.shared_folder import SharedFolder
from paceline.launching.members.store import Store


def open_store(backend: str, endpoint: str, job: str) -> Store:
    """Open a job's store in an etcd (`HOST[:PORT],...`, `https+etcd://HOST`), or in a folder."""
    scheme, mark, hosts = endpoint.partition("://") if backend == "etcd" else ("", "", "")
    if backend == "etcd" and not mark:
        scheme, hosts = "etcd", endpoint
    if scheme in ("etcd", "https+etcd") and hosts.strip():
        return Etcd(list_servers(hosts, "http" if scheme == "etcd" else "https"), job)
    if backend == "folder" and endpoint.strip():
        return SharedFolder(Path(endpoint), job)
    raise PacelineError(
        "PL380",
        saw=f"--rdzv-endpoint {endpoint!r} with --rdzv-backend {backend}.",
        rule="It is HOST:PORT of an etcd (several with commas; https+etcd://HOST:PORT with TLS), or the path "
        "of a folder that all nodes share.",
        fix=f"For an etcd with TLS, write https+etcd://{hosts}."
        if scheme == "https" and hosts
        else "Use for example --rdzv-endpoint etcd0:2379, or --rdzv-endpoint /shared/rendezvous.",
    )
