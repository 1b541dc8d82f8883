"""A warm pool of rank processes for tests.

Importing torch in every rank of every test would take most of the suite's time. The pool's
processes are forked from a server that has torch loaded, live as long as the test session, and run
one test function after another. A test gets it as the fixture `ranks`:

    def all_reduce(world, start):                 # module level; runs on every rank
        x = torch.tensor(start + world.rank)
        torch.distributed.all_reduce(x)
        return x.item()

    def test_all_reduce(ranks):
        assert ranks.run(all_reduce, nproc=2, args=(5,)) == [11, 11]

Protocol: the pool opens a store and sends each process its rank's environment, the function (by
name) and the arguments; each answers with a value or an exception. A process that doesn't answer
in time is asked for its stacks (faulthandler on SIGUSR1), killed and replaced.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import gc
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

MAX_RANKS = 8
# How long the others may go on after one rank has failed: it tells more when they fail by themselves.
_GRACE_S = 3.0
# A busy machine may take this many times as long as an idle one.
_PATIENCE = 3
# The trainer alone takes 1 s to import, in every rank and in each that replaces another.
_PRELOAD = [
    *("torch", "torch.distributed", "torch.nn.parallel", "torch._dynamo", "pytest"),
    *("paceline.world", "paceline.train.trainer", "paceline.train.run", "paceline.verifying.check"),
]


class RankError(AssertionError):
    """One or more ranks failed, died or hung; the message holds each rank's traceback or stacks.

    Attributes:
        reports: per rank, what happened to it.
        causes: per rank that raised something that can be pickled, the exception itself.
        exit_codes: per rank that died, its exit code (negative: the signal).
        stuck: the ranks that did not answer in time.
    """

    def __init__(self, reports: dict[int, str]) -> None:
        self.reports = reports
        self.causes: dict[int, BaseException] = {}
        self.exit_codes: dict[int, int | None] = {}
        self.stuck: list[int] = []
        super().__init__("\n\n".join(f"--- rank {rank}: {reports[rank]}" for rank in sorted(reports)))


@contextlib.contextmanager
def _without_name_server() -> Iterator[None]:
    """Let no name server be asked meanwhile; /etc/hosts still is.

    torch asks for the name of 127.0.0.1 at every connection to a store. Where the name server is slow or
    drops questions, as in many containers, each of them costs up to 5 s.
    """
    before = os.environ.get("RES_OPTIONS")
    os.environ["RES_OPTIONS"] = "attempts:0"
    try:
        yield
    finally:
        if before is None:
            del os.environ["RES_OPTIONS"]
        else:
            os.environ["RES_OPTIONS"] = before


@dataclass
class _Answer:
    value: Any = None
    failed: str = ""
    cause: BaseException | None = None


# torch keeps the groups of meshes after a world has ended, each with threads of gloo's that wake up all the
# time: after a few hundred tests the ranks were busy with those alone. Then a fresh one takes its place.
_MAX_THREADS = 150


def _count_threads(pid: int | None) -> int:
    try:
        return len(os.listdir(f"/proc/{pid}/task"))
    except OSError:  # gone, or not Linux
        return 0


class Pool:
    """Rank processes that live as long as the test session; grows to what a test asks for."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(_PRELOAD)
        with _without_name_server():  # the ranks inherit it
            forkserver.ensure_running()
        self._members: list[_Member] = []
        self._folder = tempfile.TemporaryDirectory(prefix="paceline-ranks-")

    def run(
        self,
        fn: Callable[..., Any],
        nproc: int = 2,
        args: tuple[Any, ...] = (),
        timeout_s: float = 30.0,
        *,
        start: Mapping[str, Any] | None = None,
        world: bool = True,
        env: Mapping[str, str] | None = None,
    ) -> list[Any]:
        """Run `fn(world, *args)` on `nproc` ranks and return what they return, by rank.

        Args:
            fn: a function at the top level of a test module.
            nproc: number of ranks, up to 8.
            args: pickled to every rank.
            timeout_s: of the whole call on an idle machine; a busy one gets `_PATIENCE` times as long. Then
                stuck ranks are killed and their stacks shown.
            start: settings for `paceline.start`; without them one thread per rank on CPU.
            world: False calls `fn(*args)` in the ranks' environment, without starting a world.
            env: more environment variables; an empty value unsets one.

        Raises:
            RankError: a rank raised, died or hung.
        """
        with _without_name_server():
            return self._run(fn, nproc, args, _PATIENCE * timeout_s, start, world, env)

    def _run(
        self,
        fn: Callable[..., Any],
        nproc: int,
        args: tuple[Any, ...],
        timeout_s: float,
        start: Mapping[str, Any] | None,
        world: bool,
        env: Mapping[str, str] | None,
    ) -> list[Any]:
        import torch.distributed as dist

        assert 1 <= nproc <= MAX_RANKS, f"the pool has up to {MAX_RANKS} ranks, asked for {nproc}"
        while len(self._members) < nproc:
            self._members.append(_Member(self._context, Path(self._folder.name)))
        for rank, member in enumerate(self._members[:nproc]):
            if _count_threads(member.process.pid) > _MAX_THREADS:
                self._replace(rank)
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        options = {"device": "cpu", "threads_per_rank": 1, "timeout_s": timeout_s + 10, **(start or {})}
        for rank, member in enumerate(self._members[:nproc]):
            place = {
                "RANK": str(rank),
                "WORLD_SIZE": str(nproc),
                "LOCAL_RANK": str(rank),
                "LOCAL_WORLD_SIZE": str(nproc),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(store.port),
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                **(env or {}),
            }
            job = pickle.dumps((fn, args, options if world else None))
            member.pipe.send((sys.path, os.getcwd(), place, job))
        try:
            return self._collect(nproc, timeout_s)
        except RankError:
            raise
        except BaseException:  # pytest's limit for a test: these ranks would answer the next call
            while self._members:
                self._members.pop().kill()
            raise

    def _collect(self, nproc: int, timeout_s: float) -> list[Any]:
        waiting = dict(enumerate(self._members[:nproc]))
        answers: dict[int, _Answer] = {}
        reports: dict[int, str] = {}
        exit_codes: dict[int, int | None] = {}
        deadline = time.monotonic() + timeout_s
        while waiting and time.monotonic() < deadline:
            wait([member.pipe for member in waiting.values()], max(0.0, deadline - time.monotonic()))
            for rank, member in list(waiting.items()):
                if not member.pipe.poll():
                    continue
                del waiting[rank]
                try:
                    answer = answers[rank] = pickle.loads(member.pipe.recv_bytes())
                except (EOFError, ConnectionResetError):
                    member.process.join(5)
                    exit_codes[rank] = member.process.exitcode
                    reports[rank] = f"died with exit code {member.process.exitcode}"
                    self._replace(rank)
                else:
                    if answer.failed:
                        reports[rank] = answer.failed
                if rank in reports:
                    deadline = min(deadline, time.monotonic() + _GRACE_S)
        for rank, member in waiting.items():
            reports[rank] = f"did not answer in time; its stacks:\n{member.stacks()}"
        for rank in waiting:
            self._replace(rank)
        if reports:
            error = RankError(reports)
            error.causes = {rank: a.cause for rank, a in answers.items() if a.cause is not None}
            error.exit_codes, error.stuck = exit_codes, sorted(waiting)
            raise error
        return [answers[rank].value for rank in range(nproc)]

    def _replace(self, rank: int) -> None:
        self._members[rank].kill()
        self._members[rank] = _Member(self._context, Path(self._folder.name))

    def pids(self) -> list[int]:
        """Return the process ids of the ranks that run at the moment."""
        return [member.process.pid for member in self._members if member.process.pid is not None]

    def close(self) -> None:
        """End every process."""
        for member in self._members:
            member.kill()
        self._members.clear()
        self._folder.cleanup()


class _Member:
    """One process of the pool, seen from pytest."""

    def __init__(self, context: multiprocessing.context.ForkServerContext, folder: Path) -> None:
        self.pipe, theirs = context.Pipe()
        fd, name = tempfile.mkstemp(dir=folder, prefix="stacks-")
        os.close(fd)
        self._stacks_file = Path(name)
        self.process = context.Process(target=_serve, args=(theirs, name), daemon=True)
        self.process.start()
        theirs.close()

    def stacks(self) -> str:
        """Return all threads' Python stacks of a stuck process."""
        assert self.process.pid is not None
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGUSR1)
        end = time.monotonic() + 2
        while time.monotonic() < end and not self._stacks_file.read_text():
            time.sleep(0.05)
        time.sleep(0.05)
        return self._stacks_file.read_text() or "(none: the process did not react)"

    def kill(self) -> None:
        self.process.kill()
        self.process.join(5)
        self.pipe.close()
        self.process.close()


# ---- inside the rank processes


def _serve(pipe: Connection, stacks_file: str) -> None:
    import torch

    # A Ctrl-C in the terminal is for pytest alone; it ends the pool when it leaves.
    os.setsid()
    stacks = open(stacks_file, "w")  # noqa: SIM115 (open for the life of the process)
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    torch.set_num_threads(1)
    num_modules = freeze_modules(0)
    environ, handlers = dict(os.environ), {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}
    while True:
        try:
            path, folder, place, job = pipe.recv()
        except (EOFError, ConnectionResetError):  # pytest has gone
            os._exit(0)
        sys.path[:] = path
        os.chdir(folder)
        for name, value in place.items():
            if value:
                os.environ[name] = value
            else:
                os.environ.pop(name, None)
        answer = _answer(job)
        _reset(environ, handlers)
        num_modules = freeze_modules(num_modules)
        try:
            reply = pickle.dumps(answer)
        except Exception as error:  # what the function returned can't be pickled
            reply = pickle.dumps(_Answer(failed=f"its result can't be sent back: {error!r}"))
        pipe.send_bytes(reply)


def _answer(job: bytes) -> _Answer:
    from paceline.world import start

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            # As in pyproject.toml: torch's compiler says so on exactly this Python.
            warnings.filterwarnings("ignore", "Guards may run slower on Python 3.13.0", RuntimeWarning)
            fn, args, options = pickle.loads(job)
            if options is None:
                return _Answer(fn(*args))
            with start(**options) as world:
                return _Answer(fn(world, *args))
    except BaseException as error:
        text = traceback.format_exc()
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:  # then its text must do
            return _Answer(failed=text)
        return _Answer(failed=text, cause=error)


def _reset(environ: Mapping[str, str], handlers: Mapping[int, Any]) -> None:
    """Restore the state of the process that a test may have changed."""
    import torch
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
    os.environ.clear()
    os.environ.update(environ)
    for number, handler in handlers.items():
        signal.signal(number, handler)
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.backends.cudnn.deterministic = False
    torch.backends.cudnn.benchmark = False
    torch.set_num_threads(1)
    torch.set_grad_enabled(True)
    torch.autograd.set_detect_anomaly(False)
    _forget_meshes()
    gc.collect()
    sys.stdout.flush()
    sys.stderr.flush()


def freeze_modules(before: int) -> int:
    """Leave modules that were loaded since then out of the search for garbage, which takes up to 0.3 s
    otherwise, several times in a test; return how many modules are loaded now."""
    if len(sys.modules) > before:
        gc.freeze()
    return len(sys.modules)


def _forget_meshes() -> None:
    """Empty torch's caches for DTensors: they keep every mesh, and with it a group and its threads."""
    if "torch.distributed.tensor" not in sys.modules:
        return
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()
    for name, module in list(sys.modules.items()):
        if name.startswith("torch.distributed.tensor."):
            for each in vars(module).values():
                if isinstance(each, functools._lru_cache_wrapper):
                    each.cache_clear()
