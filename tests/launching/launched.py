"""A `paceline run` (or a torchrun) under observation: its output, its processes, what it leaves behind.

Processes are told by a variable with a random value that all of them inherit, so that other jobs on the
machine don't matter. Where mounts can be made, the job sees a /dev/shm of its own.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import TracebackType

import psutil

SCRIPTS = Path(__file__).parent / "scripts"
_BIN = Path(sys.executable).parent
_MARK = "PACELINE_TEST_MARK"
_REPOSITORY = Path(__file__).parents[2]
# Its own source first, also where another checkout is installed.
_PATH = os.pathsep.join(map(str, (_REPOSITORY / "src", _REPOSITORY)))


def paceline_run(*words: str) -> list[str]:
    """Return the command line of `paceline run`."""
    return [str(_BIN / "paceline"), "run", *words]


def torchrun(*words: str) -> list[str]:
    """Return the command line of torchrun."""
    return [str(_BIN / "torchrun"), *words]


def script(name: str) -> str:
    """Return the path of a script under test."""
    return str(SCRIPTS / name)


class Launched:
    """A job that was started, from `__enter__` on; what is left of it ends with `__exit__`."""

    def __init__(
        self,
        folder: Path,
        command: Sequence[str],
        *,
        env: Mapping[str, str | None] | None = None,
        around: Callable[[Sequence[str]], list[str]] = list,
        has_terminal: bool = False,
    ) -> None:
        """Args:
        folder: for its working folder, its temporary files and its shared memory.
        command: what to start.
        env: variables beside those of this process; None takes one away.
        around: makes the command that starts it in another place.
        has_terminal: whether it has a terminal of its own.
        """
        self.mark = secrets.token_hex(8)
        self.work, self.tmp, self.shm = (folder / name for name in ("work", "tmp", "shm"))
        for path in (self.work, self.tmp, self.shm):
            path.mkdir(parents=True, exist_ok=True)
        self._command = around(self._with_shm(command))
        self._env = {**os.environ, _MARK: self.mark, "TMPDIR": str(self.tmp), "PYTHONPATH": _PATH}
        self._env.setdefault("OMP_NUM_THREADS", "1")
        for name, value in (env or {}).items():
            self._env.pop(name, None)
            if value is not None:
                self._env[name] = value
        self._has_terminal = has_terminal
        self._text = ""
        self._lock = threading.Condition()
        self._ports: set[int] = set()

    def __enter__(self) -> Launched:
        self.start_s = time.monotonic()
        if self._has_terminal:
            source, end = os.openpty()
            # `setsid` makes the terminal that of the new session: so closing it is a hang-up.
            command = ["setsid", "--ctty", *self._command]
            self.process = subprocess.Popen(
                command, stdin=end, stdout=end, stderr=end, env=self._env, cwd=self.work
            )
        else:
            source, end = os.pipe()
            self.process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=end,
                stderr=end,
                env=self._env,
                cwd=self.work,
                process_group=0,
            )
        os.close(end)
        self._source = source
        self._is_open = True
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for process in self.processes():
            with suppress(psutil.Error):
                process.kill()
        with suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait(20)
        self._reader.join(5)
        with suppress(OSError):
            if self._is_open:
                os.close(self._source)
        if error is not None:  # pytest shows it beside what failed
            print(f"--- what the job of this test printed:\n{self.text}")

    def _with_shm(self, command: Sequence[str]) -> list[str]:
        if not _can_mount():
            return list(command)
        mount = f'mount --bind {self.shm} /dev/shm; exec "$@"'
        return ["unshare", "--mount", "--propagation", "private", "sh", "-c", mount, "sh", *command]

    # ---- output

    @property
    def terminal(self) -> int:
        """The descriptor behind its terminal, where keys are pressed."""
        return self._source

    @property
    def text(self) -> str:
        """The output on both streams."""
        with self._lock:
            return self._text

    def wait_for(self, pattern: str, seconds: float, count: int = 1) -> list[str]:
        """Wait until a pattern has been printed so many times; return all matches."""
        end = time.monotonic() + seconds
        with self._lock:
            while len(found := re.findall(pattern, self._text)) < count:
                left = end - time.monotonic() if self._reader.is_alive() else 0.0
                assert left > 0, f"{pattern!r} x {count} not printed:\n{self._text}"
                self._lock.wait(min(left, 0.5))
        return [str(match) for match in found]

    def wait(self, seconds: float) -> int:
        """Wait for its end; return the exit code."""
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"runs on after {seconds} s:\n{self.text}") from None
        self._reader.join(3)
        return code

    def close_terminal(self) -> None:
        """Hangs up: the reading end of the terminal is closed."""
        self._is_open = False
        fd, self._source = self._source, -1
        os.close(fd)

    def _read(self) -> None:
        import select

        while self._is_open:
            # Polled, because closing a descriptor does not wake its reader.
            with suppress(OSError, ValueError):
                if not select.select([self._source], [], [], 0.1)[0]:
                    continue
            try:
                data = os.read(self._source, 65536)
            except OSError:
                data = b""
            with self._lock:
                self._text += data.decode(errors="replace").replace("\r\n", "\n")
                self._lock.notify_all()
            if not data:
                return

    # ---- processes

    def signal(self, number: int) -> None:
        """Send a signal to the launcher alone."""
        self.process.send_signal(number)

    def signal_group(self, number: int) -> None:
        """Send a signal to the launcher's process group, as a terminal does."""
        os.killpg(self.process.pid, number)

    def processes(self) -> list[psutil.Process]:
        """Return all of its living processes."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                is_ours = f"{_MARK}={self.mark}".encode() in _read_environ(process.pid).split(b"\0")
                if is_ours and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def helpers(self) -> tuple[int, int]:
        """Return the process ids of the keeper and the pump, the launcher's two children."""
        words = {}
        for child in psutil.Process(self.process.pid).children():
            with suppress(psutil.Error):
                words[child] = child.cmdline()
        pump = next(child for child in words if any("pump.py" in word for word in words[child]))
        keeper = next(child for child in words if child != pump and "lint" not in words[child])
        return keeper.pid, pump.pid

    def wait_for_threads(self, seconds: float) -> None:
        """Wait until the launcher has threads: torch is imported, and the agent at work."""
        end = time.monotonic() + seconds
        while psutil.Process(self.process.pid).num_threads() == 1:
            assert time.monotonic() < end, f"no agent after {seconds} s:\n{self.text}"
            time.sleep(0.05)

    def note_ports(self) -> None:
        """Remembers the ports where it listens now."""
        for process in self.processes():
            with suppress(psutil.Error):
                for connection in process.net_connections("tcp"):
                    if connection.status == psutil.CONN_LISTEN:
                        self._ports.add(connection.laddr.port)

    # ---- afterwards

    def find_left(self, seconds: float, ignored: Iterable[str] = ()) -> str:
        """Return what is left of it after so many seconds at most; empty if nothing is."""
        end = time.monotonic() + seconds
        while True:
            left = self._describe_left(tuple(ignored))
            if not left or time.monotonic() > end:
                return left
            time.sleep(0.1)

    def _describe_left(self, ignored: tuple[str, ...]) -> str:
        parts = []
        for process in self.processes():
            with suppress(psutil.Error):
                parts.append(f"process {process.pid} ({' '.join(process.cmdline())[-80:]})")
        listening = {
            c.laddr.port
            for c in (psutil.net_connections("tcp") if self._ports else [])
            if c.status == psutil.CONN_LISTEN
        }
        parts += [f"port {port}" for port in sorted(self._ports & listening)]
        parts += [f"/dev/shm/{path.name}" for path in self.shm.iterdir()]
        parts += [f"TMPDIR/{p.name}" for p in self.tmp.iterdir() if not p.name.startswith(ignored or ("\0",))]
        return ", ".join(parts)


def end_jobs_in(folders: Iterable[Path]) -> None:
    """Kill all processes of the jobs that were started in these folders."""
    wanted = {f"TMPDIR={folder}/".encode() for folder in folders}
    for pid in psutil.pids():
        words = _read_environ(pid).split(b"\0")
        if any(word.startswith(tuple(wanted)) for word in words if word.startswith(b"TMPDIR=")):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@cache
def _can_mount() -> bool:
    if shutil.which("unshare") is None or os.geteuid() != 0:
        return False
    words = ["unshare", "--mount", "--propagation", "private", "mount", "--bind", "/tmp", "/dev/shm"]
    return subprocess.run(words, capture_output=True, timeout=20, check=False).returncode == 0


def _read_environ(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""


ASKING = {
    "SIGINT": signal.SIGINT,
    "SIGTERM": signal.SIGTERM,
    "SIGHUP": signal.SIGHUP,
    "SIGQUIT": signal.SIGQUIT,
}
"""Signals that ask a job to end."""
