"""Reads the launcher's environment and starts the process group: `start` and `World`.

Protocol of a start, in the order of every rank:

1. `read_environment` turns the variables of torchrun, srun or mpirun into a `RankPlace`.
2. The deterministic switches and the threads are set.
3. All ranks meet at a store: rank 0 opens a port at MASTER_ADDR:MASTER_PORT (under torchrun the
   agent has opened it), the others connect. A world of one uses a store inside the process.
4. Every rank increments a counter and waits until it reaches the world size. A missing rank is then named,
   and does not appear as a connection error in gloo or NCCL.
5. The ranks agree on their devices (`devices.py`).
6. `init_process_group` on that store, then the seeds.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist

from paceline.devices import CUBLAS, agree_on_device, choose_alone, deterministic_kernels, see_devices
from paceline.errors import PacelineError
from paceline.own_code import print_errors_alone
from paceline.phrases import first_line
from paceline.place import Launcher, RankPlace, check_interfaces, read_environment, usable_cores
from paceline.signatures import explain_arguments
from paceline.torch_seams.gloo_threads import await_gloo_threads, schedule_loops_as_batch
from paceline.torch_seams.groups import forget_group_count

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

log = logging.getLogger(__name__)

_COUNT, _ALL, _JOINED = "paceline/count", "paceline/all", "paceline/joined/"
_CONNECTED, _LEFT, _MET = "paceline/connected/", "paceline/left/", "paceline/met/"
# On a clean close, the rank that hosts the store waits this long for ranks that may still read it.
_LEAVE_S = 30.0
# A start waits this long for ranks that still connect; later collectives wait for them too.
_CONNECT_S = 60.0
# After an exception other ranks may be stuck, and destroying a group can then wait for them.
_ABANDON_S = 5.0


# True in a rank that was forked from a notebook: it has not inherited OpenMP's threads.
FORKED = False

# The open worlds of this process, the newest last (a notebook may start one inside another).
_current: list[World] = []


@dataclass(eq=False)
class World:
    """This process's place among the ranks, and the owner of the process group.

    Attributes:
        rank: 0 to `world_size - 1`.
        local_rank: the rank's number within this node.
        world_size: number of ranks.
        local_world_size: number of ranks on this node.
        node_rank: 0 to `num_nodes - 1`.
        num_nodes: number of nodes.
        device: the device that this rank computes on.
        backend: as `torch.distributed` names it: `"gloo"`, `"cpu:gloo,cuda:nccl"`, ...
        launcher: the program that started the ranks: `"torchrun"`, `"slurm"`, `"mpi"` or `"single"`.
        timeout_s: seconds after which a collective fails.
        seed: the seed of every generator.
        deterministic: whether torch uses deterministic algorithms only.
        threads_per_rank: the argument of `start`.
        groups: the groups made so far, by their ranks. Trainers of one world share them, because every group
            has its own threads, which wake up until the process ends.
        spare_groups: groups returned by `Mesh.return_group`, by their ranks.
        error: by which it is being closed.
        store: of all ranks; `None` over a process group that the caller made.
    """

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    node_rank: int
    num_nodes: int
    device: torch.device
    backend: str
    launcher: Launcher
    timeout_s: float
    seed: int
    deterministic: bool
    threads_per_rank: int | Literal["auto"] = "auto"
    groups: dict[tuple[int, ...], dist.ProcessGroup] = field(default_factory=dict, repr=False)
    spare_groups: dict[tuple[int, ...], list[dist.ProcessGroup]] = field(default_factory=dict, repr=False)
    error: BaseException | None = None
    _undo: contextlib.ExitStack = field(default_factory=contextlib.ExitStack, repr=False)
    store: Store | None = field(default=None, repr=False)
    _hosts_store: bool = field(default=False, repr=False)
    _owns_group: bool = field(default=False, repr=False)
    _closed: bool = field(default=False, repr=False)

    def __repr__(self) -> str:
        return (
            f"World(rank {self.rank} of {self.world_size}, node {self.node_rank} of {self.num_nodes}, "
            f"{self.device}, {self.backend}, started by {self.launcher})"
        )

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, the rank that writes and prints."""
        return self.rank == 0

    @property
    def host(self) -> torch.device:
        """Where ranks exchange what they then read: the CPU, unless the backend sends from devices alone."""
        sends = all(part.endswith("nccl") for part in self.backend.split(","))
        return self.device if sends else torch.device("cpu")

    def wait_for_device(self) -> None:
        """Wait until this rank's device has done all work that it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def barrier(self) -> None:
        """Wait until every rank is here. All ranks must call it."""
        if self.device.type == "cuda" and "nccl" in self.backend:
            dist.barrier(device_ids=[self.device.index])
        else:
            dist.barrier()

    def broadcast_object(self, obj: Any, src: int = 0) -> Any:
        """Send the object of rank `src`, pickled, to every rank, and return it. All ranks must call it."""
        box = [obj]
        dist.broadcast_object_list(box, src=src, device=self.host)
        return box[0]

    def pin_threads(self, num_threads: int) -> None:
        """Set the threads of one operator on CPU until close, unless the user set a number in `start`."""
        if self.threads_per_rank != "auto":
            return
        torch.set_num_threads(num_threads)
        num_usable = usable_cores() // self.local_world_size
        if self.device.type == "cpu" and self.is_main and num_usable > num_threads:
            log.warning(
                "using %d CPU thread per rank although %d cores per rank are usable: the thread count "
                "affects the last bits of results, so it is not derived from the number of ranks; set "
                "threads_per_rank to change it",
                num_threads,
                num_usable,
            )

    def switch_on_determinism(self) -> None:
        """Let CUDA use only deterministic kernels until close, and log it, unless it does already."""
        if self.device.type == "cuda" and not self.deterministic:
            self._undo.enter_context(deterministic_kernels(self.device))
            self.deterministic = True
            if self.is_main:
                log.warning(
                    "deterministic kernels are switched on: without them the exact reduction would not give "
                    "the same bits on CUDA. They may be slower, and an operation that has none is an error; "
                    'reduction="fast" does not need them'
                )

    def on_close(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Register a function to call at close, when the process group is gone; the last one runs first.

        Returns:
            a function that takes the registration back.
        """
        callbacks = [callback]
        self._undo.callback(lambda: [each() for each in callbacks])
        return callbacks.clear

    def close(self) -> None:
        """Destroy the process group and restore the settings that `start` changed. Safe to call twice.

        A group that existed before `start` is kept. All ranks should call it.
        """
        self._close(failed=False)

    def __enter__(self) -> World:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._close(failed=kind is not None, error=error)

    def _close(self, *, failed: bool, error: BaseException | None = None) -> None:
        if self._closed:
            return
        self._closed, self.error = True, error
        try:
            if self._owns_group and dist.is_initialized():
                if failed:
                    _abandon_group(self.device)
                else:
                    await_gloo_threads()
                    dist.destroy_process_group()
                    self._leave_store()
        finally:
            self.store = None
            self._undo.close()
            self.error = None  # it holds the frames of the training

    def _leave_store(self) -> None:
        """Keep the store open until the other ranks have left it."""
        if self.store is None or self.world_size == 1:
            return
        # If a peer has ended and the store with it, this rank's own end is still clean.
        with contextlib.suppress(RuntimeError):
            self.store.set(f"{_LEFT}{self.rank}", "1")
            if self._hosts_store:
                _await_all(self.store, _LEFT, self.world_size, _LEAVE_S)


@explain_arguments
def start(
    *,
    backend: str | None = None,
    device: str = "auto",
    timeout_s: float = 600.0,
    seed: int = 0,
    threads_per_rank: int | Literal["auto"] = "auto",
    deterministic: bool = False,
) -> World:
    """Join the ranks that torchrun, srun or mpirun started, or start a world of one.

    All ranks must call it. Use it as a context manager, or call `World.close` at the end.
    A process group that already exists is used, and not destroyed at the end.

    Args:
        backend: as for `init_process_group`; default gloo on CPU, `"cpu:gloo,cuda:nccl"` on CUDA.
        device: `"cpu"`, `"cuda"` (the device of the local rank, or the rank's own if it sees others than the
            ranks of its node), or `"auto"`: CUDA if any rank sees a device, else CPU. With a backend other
            than NCCL, ranks may share a device.
        timeout_s: seconds for the ranks to meet, and for every collective.
        seed: of Python's, NumPy's (if imported) and torch's generators, the same on every rank.
        threads_per_rank: threads of one operator on CPU. `"auto"` divides the cores that this process may
            use by the ranks of this node. Restored at close.
        deterministic: use only deterministic algorithms; an operator without one raises. Restored at close.

    Raises:
        PacelineError: PL300 to PL304, PL361 and PL362 for a contradictory environment, PL305 to PL308 and
            PL324 for device and backend, PL309 to PL312 if the ranks do not meet, PL313, PL314 and PL316 for
            settings that are out of range, too late, or impossible in a forked rank.
    """
    _check_settings(timeout_s, seed, threads_per_rank)
    joined = dist.is_available() and dist.is_initialized()
    place = _place_of_group() if joined else read_environment(os.environ)
    undo = contextlib.ExitStack()
    where, store = torch.device("cpu"), None
    try:
        print_errors_alone()
        seen = see_devices(device, backend, place)
        _set_threads(threads_per_rank, place, undo)
        hosts = place.world_size > 1 and place.rank == 0 and not place.agent_store
        if joined:
            where, names = choose_alone(seen), str(dist.get_backend())
        else:
            check_interfaces(os.environ)
            store = _meet(place, timeout_s, hosts=hosts)
            wait = partial(_await_all, seconds=timeout_s)
            where = agree_on_device(seen, store, place.rank, place.world_size, wait)
            names = _pick_backend(backend, where)
        if where.type == "cuda":
            torch.cuda.set_device(where)
            # torch reads it once per process, at the first product, deterministic or not. So it stays.
            os.environ.setdefault(CUBLAS, ":4096:8")
        if deterministic:
            undo.enter_context(deterministic_kernels(where))
        if store is not None:
            _init_group(store, place, names, where, timeout_s)
            if place.world_size > 1:
                # A gloo connection completes on one rank before it does on its peer. If that rank ended at
                # once, the peer's start would fail (PL312).
                store.set(f"{_CONNECTED}{place.rank}", "1")
                _await_all(store, _CONNECTED, place.world_size, min(timeout_s, _CONNECT_S))
        schedule_loops_as_batch()
        _seed_everything(seed)
    except BaseException:
        if not joined and dist.is_initialized():
            _abandon_group(where)
        undo.close()
        raise
    world = World(
        rank=place.rank,
        local_rank=place.local_rank,
        world_size=place.world_size,
        local_world_size=place.local_world_size,
        node_rank=place.node_rank,
        num_nodes=place.num_nodes,
        device=where,
        backend=names,
        launcher=place.launcher,
        timeout_s=timeout_s,
        seed=seed,
        deterministic=deterministic,
        threads_per_rank=threads_per_rank,
        _undo=undo,
        store=store,
        _hosts_store=hosts,
        _owns_group=not joined,
    )
    _current.append(world)
    undo.callback(_current.remove, world)
    return world


def current_world() -> World:
    """Return the newest world of `start` that is still open."""
    if not _current:
        raise PacelineError(
            "PL315",
            saw="no world was started in this process.",
            rule="Training needs this process's rank and the number of ranks.",
            fix="Put the training inside `with paceline.start() as world:`.",
        )
    return _current[-1]


def _check_settings(timeout_s: float, seed: int, threads: int | str) -> None:
    def refuse(saw: str, rule: str, fix: str) -> PacelineError:
        return PacelineError("PL313", saw=saw, rule=rule, fix=fix)

    if not 0 < timeout_s < 10**8:
        raise refuse(
            f"timeout_s={timeout_s!r}.",
            "A timeout is a number of seconds above 0.",
            "Leave it out for 600 seconds.",
        )
    if not 0 <= seed < 2**63:
        raise refuse(
            f"seed={seed!r}.", "A seed is a whole number from 0 to 2**63 - 1.", "Use for example seed=0."
        )
    if isinstance(threads, int) and threads < 1:
        raise refuse(
            f"threads_per_rank={threads!r}.", 'It is "auto" or a number of threads from 1.', 'Use "auto".'
        )


# ---- device, backend, threads, seeds


def _pick_backend(backend: str | None, device: torch.device) -> str:
    if backend is None:
        return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    for part in backend.split(","):
        name = part.split(":")[-1]
        available = name in dist.Backend.backend_list and dist.is_backend_available(name)
        if not available or (name == "nccl" and device.type != "cuda"):
            known = [n for n in ("gloo", "nccl", "mpi", "ucc") if dist.is_backend_available(n)]
            raise PacelineError(
                "PL308",
                saw=f"backend={backend!r} on device {device.type!r}.",
                rule=f"This torch has {', '.join(known)}; nccl needs CUDA devices.",
                fix="Leave backend out: gloo on CPU, NCCL on CUDA.",
            )
    return backend


def _set_threads(threads: int | str, place: RankPlace, undo: contextlib.ExitStack) -> None:
    if isinstance(threads, int):
        if FORKED and threads > 1:
            raise PacelineError(
                "PL316",
                saw=f"threads_per_rank={threads} in a rank that was forked from a notebook or a shell.",
                rule="OpenMP's threads do not survive a fork, and computing with several threads would hang.",
                fix='Use "auto" or 1, or put the function that you launch into a module.',
            )
        wanted = threads
    elif FORKED:
        wanted = 1
    elif place.cores_per_rank is not None:
        wanted = max(1, min(place.cores_per_rank, usable_cores()))
    else:
        wanted = max(1, usable_cores() // place.local_world_size)
    undo.callback(torch.set_num_threads, torch.get_num_threads())
    torch.set_num_threads(wanted)


def _seed_everything(seed: int) -> None:
    random.seed(seed)
    torch.manual_seed(seed)  # CPU, and every CUDA device, also where CUDA starts later
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)  # it takes 32 bits


# ---- meeting the other ranks


def _place_of_group() -> RankPlace:
    """Return the place of a process with an existing group; its node is known only from the environment."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    with contextlib.suppress(PacelineError):
        place = read_environment(os.environ)
        if (place.rank, place.world_size) == (rank, world_size):
            return place
    return RankPlace(
        launcher="single" if world_size == 1 else "torchrun",
        rank=rank,
        world_size=world_size,
        local_rank=rank,
        local_world_size=world_size,
    )


def _meet(place: RankPlace, timeout_s: float, *, hosts: bool) -> Store:
    """Open or reach the store, wait until all ranks have joined it, and return it."""
    if place.world_size == 1:
        return dist.HashStore()  # type: ignore[attr-defined]
    assert place.master_addr is not None
    assert place.master_port is not None
    deadline = time.monotonic() + timeout_s
    store = _host_store(place, timeout_s) if hosts else _reach_store(place, timeout_s, deadline)
    # A launcher's store outlives a world, whose keys the next one of this size must not take for its own. The
    # store knows their number; a rank does not, because some worlds have fewer ranks, and starts may fail.
    common, met = store, f"{_MET}{place.world_size}/{place.rank}"
    store = dist.PrefixStore(f"{_MET}{place.world_size}/{common.add(met, 0)}", common)  # type: ignore[attr-defined]
    store.set(f"{_JOINED}{place.rank}", socket.gethostname())
    if store.add(_COUNT, 1) == place.world_size:
        store.set(_ALL, "1")
    pause_s = 0.002
    # Poll instead of waiting once: Ctrl-C cannot interrupt a wait inside the store.
    while not store.check([_ALL]):
        if time.monotonic() > deadline:
            raise _not_all_came(store, place, timeout_s)
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.2)
    common.add(met, 1)
    return store


def _await_all(store: Store, prefix: str, world_size: int, seconds: float) -> None:
    """Wait until every rank has set its key, at most for `seconds`."""
    keys = [f"{prefix}{rank}" for rank in range(world_size)]
    deadline = time.monotonic() + seconds
    pause_s = 0.001
    while not store.check(keys) and time.monotonic() < deadline:
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.05)


def _host_store(place: RankPlace, timeout_s: float) -> Store:
    assert place.master_addr is not None
    assert place.master_port is not None
    try:
        return dist.TCPStore(  # type: ignore[attr-defined]
            place.master_addr,
            place.master_port,
            place.world_size,
            is_master=True,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
        )
    except dist.DistError as error:
        address = f"{place.master_addr}:{place.master_port}"
        if "EADDRINUSE" in str(error) or "address already in use" in str(error).lower():
            raise PacelineError(
                "PL309",
                saw=f"rank 0 cannot open {address}: the port is taken.",
                rule="The ranks of a run meet at one port of rank 0's machine, and no other run may hold it.",
                fix="Set MASTER_PORT to a free port on all ranks, or end the run that holds it.",
            ) from None
        raise PacelineError(
            "PL309",
            saw=f"rank 0 cannot open {address}: {first_line(error)}.",
            rule="The ranks of a run meet at one port of rank 0's machine.",
            fix="Set MASTER_ADDR to an address of rank 0's machine, MASTER_PORT to a free port above 1023.",
        ) from None


def _reach_store(place: RankPlace, timeout_s: float, deadline: float) -> Store:
    assert place.master_addr is not None
    assert place.master_port is not None
    address = f"{place.master_addr}:{place.master_port}"
    why = "no answer"
    # TCPStore's own retries print a warning each and cannot be interrupted, so try a plain socket first.
    while True:
        try:
            with socket.create_connection((place.master_addr, place.master_port), timeout=2.0):
                break
        except OSError as error:
            why = error.strerror or str(error)
        if time.monotonic() > deadline:
            raise PacelineError(
                "PL310",
                saw=f"rank {place.rank} of {place.world_size} found no store at {address} within "
                f"{timeout_s:g} s ({why}).",
                rule="Rank 0 opens that port and every rank connects to it.",
                fix="Check that rank 0 has started, that MASTER_ADDR and MASTER_PORT are the same on all "
                "ranks, and that no firewall blocks the port.",
            )
        time.sleep(0.1)
    try:
        return dist.TCPStore(  # type: ignore[attr-defined]
            place.master_addr,
            place.master_port,
            place.world_size,
            is_master=False,
            timeout=timedelta(seconds=timeout_s),
        )
    except dist.DistError as error:
        raise PacelineError(
            "PL310",
            saw=f"rank {place.rank} of {place.world_size} reached {address}, but what answers there is not "
            f"a torch store: {first_line(error)}.",
            rule="Rank 0 opens that port and every rank connects to it.",
            fix="Set MASTER_PORT to a port that no other program uses.",
        ) from None


def _not_all_came(store: Store, place: RankPlace, timeout_s: float) -> PacelineError:
    missing = [rank for rank in range(place.world_size) if not store.check([f"{_JOINED}{rank}"])]
    shown = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
    return PacelineError(
        "PL311",
        saw=f"{place.world_size - len(missing)} of {place.world_size} ranks met at "
        f"{place.master_addr}:{place.master_port} within {timeout_s:g} s; missing: rank {shown}.",
        rule="Training starts when every rank has joined.",
        fix="Read the log of a missing rank, start as many ranks as WORLD_SIZE states, or raise timeout_s.",
    )


def _init_group(store: Store, place: RankPlace, backend: str, device: torch.device, timeout_s: float) -> None:
    forget_group_count()
    try:
        dist.init_process_group(
            backend,
            store=store,
            rank=place.rank,
            world_size=place.world_size,
            timeout=timedelta(seconds=timeout_s),
            # With a device bound, torch splits the groups of the world, which gloo cannot.
            device_id=device if device.type == "cuda" and "nccl" in backend else None,
        )
    except RuntimeError as error:
        raise PacelineError(
            "PL312",
            saw=f"rank {place.rank} of {place.world_size} met the others at the store, but {backend} could "
            f"not connect to them: {first_line(error)}.",
            rule="Every rank must reach every other rank at the address that its host name resolves to.",
            fix="Set GLOO_SOCKET_IFNAME (and NCCL_SOCKET_IFNAME) to the network interface between the "
            "machines, for example eth0; the usual cause is a host name that /etc/hosts resolves to "
            "127.0.1.1.",
        ) from error


def _abandon_group(device: torch.device) -> None:
    """Destroy the group, waiting at most a few seconds for other ranks."""

    def destroy() -> None:
        # An exception from here would hide the one that is being raised.
        with contextlib.suppress(Exception):
            if device.type == "cuda":
                torch.cuda.set_device(device)
            dist.destroy_process_group()

    thread = threading.Thread(target=destroy, name="paceline-abandon", daemon=True)
    thread.start()
    thread.join(_ABANDON_S)
