"""A real etcd for tests, without its v2 interface, which can be killed and started again."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

ETCD = next((path for name in ("etcd", "/usr/bin/etcd") if (path := shutil.which(name))), None)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class EtcdServer:
    """An etcd from `__enter__` to `__exit__`.

    Args:
        folder: holds its data, also for the next start.
        host: where it listens; at port 2379 unless this is the loopback address.
        around: turns its command into one that runs in a node.
    """

    def __init__(
        self, folder: Path, host: str = "127.0.0.1", around: Callable[[Sequence[str]], list[str]] = list
    ) -> None:
        self._folder, self.host = folder, host
        self.port, peer = (free_port(), free_port()) if host == "127.0.0.1" else (2379, 2380)
        client, peers = f"http://{host}:{self.port}", f"http://{host}:{peer}"
        command = [str(ETCD), "--data-dir", str(folder / "etcd"), "--enable-v2=false"]
        command += ["--listen-client-urls", client, "--advertise-client-urls", client]
        command += ["--listen-peer-urls", peers, "--initial-advertise-peer-urls", peers]
        command += ["--initial-cluster", f"default={peers}"]
        self._command = around(command)

    def __enter__(self) -> EtcdServer:
        log = self._folder / "etcd.log"
        with ExitStack() as stack:
            file = stack.enter_context(log.open("ab"))
            self.process = subprocess.Popen(self._command, stdout=file, stderr=file)
        end_s = time.monotonic() + 20
        while "ready to serve client requests" not in log.read_text() and "serving" not in log.read_text():
            is_late = time.monotonic() > end_s or self.process.poll() is not None
            assert not is_late, log.read_text()[-2000:]
            time.sleep(0.1)
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.wait(10)
