"""Opens the witness that a command line names."""

from __future__ import annotations

from pathlib import Path

from paceline.errors import PacelineError
from paceline.launching.members.etcd import Etcd, list_servers
from paceline.launching.members.shared_folder import SharedFolder
from paceline.launching.members.witness import Witness


def name_witness(backend: str, endpoint: str) -> str:
    """Return the witness that `--rdzv-backend` and `--rdzv-endpoint` name."""
    return endpoint if backend == "folder" or "://" in endpoint else f"etcd://{endpoint}"


def open_witness(text: str, job: str) -> Witness:
    """Open a job's witness: `etcd://HOST[:PORT],...` (or `https+etcd://`), or the path of a folder.

    Raises:
        PacelineError: PL380 for neither; PL384 for certificates that cannot be read.
    """
    scheme, mark, hosts = text.partition("://")
    if mark and scheme in ("etcd", "https+etcd"):
        return Etcd(list_servers(hosts, "http" if scheme == "etcd" else "https"), job)
    if mark or not text.strip():
        raise PacelineError(
            "PL380",
            saw=f"The witness {text!r}.",
            rule="--witness, or --rdzv-endpoint of the backend etcd, is etcd://HOST:PORT (several hosts with "
            "commas), or the path of a folder that all nodes share.",
            fix=_suggest(scheme, hosts),
        )
    return SharedFolder(Path(text), job)


def _suggest(scheme: str, hosts: str) -> str:
    if hosts and scheme in ("http", "https"):
        return f"For an etcd, write {'https+' if scheme == 'https' else ''}etcd://{hosts}."
    return "Use for example --witness etcd://etcd0:2379, or --witness /shared/witness."
