"""Times blocks of steps of a rank, without any change to its script, and ends the rank afterwards.

A step is an optimizer step, as a recording counts it, or a step of a `Trainer` or `Loop`. All ranks have the
same plan of blocks, and a barrier precedes each. In a block "alone", gradients are not summed: DDP's
`require_backward_grad_sync` is off, `all_reduce` returns at once, or the trainer goes without communication.
The ranks' weights diverge from then on, so the rank must not go on afterwards.

Samples are those of the loader from which the step's last batch came, so that a validation does not count.
A script without a loader has those of its model's first argument.
"""

from __future__ import annotations

import atexit
import copy
import functools
import importlib
import multiprocessing
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from paceline.bench.rank.replicas import Replicas
from paceline.errors import PacelineError
from paceline.launching.rank.import_hook import when_imported
from paceline.launching.rank.requests import write_whole
from paceline.memory.steps import STEPS
from paceline.profiling.rank.recorder import RecordSettings, StepRecorder, keep_more_calls

ENTRY = "paceline.bench.rank.timing:begin"
"""Called in each rank; see `launching.rank.requests`."""
WHOLE, ALONE = "whole", "alone"
# Other ranks may still need this one for the last step's collectives.
_LEAVE_S = 30.0
# A block that the end of the script cuts short counts from so many steps on.
_LEAST_STEPS = 2


@dataclass(frozen=True)
class TimeSettings:
    """The steps and modes that a rank times.

    Attributes:
        warm_up: steps of each mode that are left out.
        steps: of a block.
        repeats: blocks of each mode.
        modes: `WHOLE` and `ALONE`; they take turns.
        record_steps: of a recording after the last block, which tells where the time goes.
        bucket_mib: of DDP's buckets; the script's own if `None`.
        threads: threads of one process over which a batch is divided, as `nn.DataParallel` does.
        folder: for the results; the launcher sets it.
    """

    warm_up: int
    steps: int
    repeats: int
    modes: tuple[str, ...] = (WHOLE,)
    record_steps: int = 0
    bucket_mib: float | None = None
    threads: int = 0
    folder: str = ""


@dataclass
class RankTimes:
    """The result of a rank.

    Attributes:
        block_s: by mode, the seconds of a step in each block.
        block_cpu_s: by mode, the seconds that all threads of the process computed in them, per step.
        samples: by mode, those of a step.
        is_global: whether these are the samples of all ranks.
        device: `"cpu"` or `"cuda"`.
        num_parameters: of the model, if there is a DDP module or a trainer.
        gradient_bytes: of its trained parameters.
        bucket_mib: of DDP, as the script sets it.
        left_out: all-reduces and DDP modules that the blocks `ALONE` did without.
        peak_bytes: the most resident memory.
        moved_bytes: per step, between the threads of a process.
        count: steps so far.
    """

    block_s: dict[str, list[float]] = field(default_factory=dict)
    block_cpu_s: dict[str, list[float]] = field(default_factory=dict)
    samples: dict[str, list[float]] = field(default_factory=dict)
    is_global: bool = False
    device: str = "cpu"
    num_parameters: int = 0
    gradient_bytes: int = 0
    bucket_mib: float | None = None
    left_out: int = 0
    peak_bytes: int = 0
    moved_bytes: float = 0.0
    count: int = 0


class StepTimer:
    """The timer of a rank.

    Args:
        rank: global.
        settings: what to do.
    """

    def __init__(self, rank: int, settings: TimeSettings) -> None:
        self._rank = rank
        self._settings = settings
        self._times = RankTimes()
        self._torch: Any = None
        self._trainer: Any = None
        self._apart: AbstractContextManager[None] | None = None
        self._modules: list[weakref.ref[Any]] = []
        self._samples: dict[int, float] = {}
        self._last_loader = 0
        self._total_samples = 0.0
        self._mode = WHOLE
        self._recorder: StepRecorder | None = None
        self._replicas: Replicas | None = None
        self._block: tuple[float, float, float] | None = None
        self._latest = (0.0, 0.0, 0.0)
        self._done_in_block = 0
        self._plan = self._make_plan()
        self._part: tuple[str, int, bool] | None = next(self._plan)
        self._pid = os.getpid()

    def _make_plan(self) -> Iterator[tuple[str, int, bool]]:
        """Yield mode and steps of each part, and whether it counts."""
        modes = self._settings.modes
        for mode in modes:
            yield mode, self._settings.warm_up, False
        for number in range(self._settings.repeats):
            for mode in modes if number % 2 == 0 else reversed(modes):
                yield mode, self._settings.steps, True

    # ---- hooks

    def install(self, torch: Any) -> None:
        """Hook what the script will use; call it when torch has been imported."""
        self._torch = torch
        STEPS.install(torch)
        STEPS.follow(self._on_count)
        atexit.register(self._finish)
        loader = importlib.import_module("torch.utils.data").DataLoader
        self._wrap(loader, "__iter__", self._iterate)
        if self._settings.threads:
            self._wrap(loader, "__init__", self._enlarge)
        ddp = torch.nn.parallel.DistributedDataParallel
        self._wrap(ddp, "__init__", self._build_ddp)
        if self._settings.threads:
            self._wrap(ddp, "forward", self._forward_ddp)
        dist = sys.modules.get("torch.distributed")
        for name in ("torch.multiprocessing.spawn", "torch.multiprocessing"):
            self._wrap(importlib.import_module(name), "start_processes", self._take_place)
        if ALONE in self._settings.modes and dist is not None and dist.is_available():
            self._wrap(dist, "all_reduce", self._all_reduce)
        modules = sys.modules["torch.nn.modules.module"]
        self._handle: Any = modules.register_module_forward_pre_hook(self._find_model)
        when_imported("paceline.train.trainer", lambda module: self._wrap(module.Trainer, "step", self._step))
        when_imported("paceline.train.loop", lambda module: self._wrap(module.Loop, "open", self._open))

    def _wrap(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        original = getattr(owner, name)

        @functools.wraps(original)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            return around(original, *args, **kwargs)

        setattr(owner, name, wrapped)

    def _take_place(
        self, _original: Any, fn: Any, args: Any = (), nprocs: int = 1, join: bool = True, *_: Any, **_k: Any
    ) -> Any:
        """Call the function of `mp.spawn` in this rank, as the process of the same number would."""
        num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
        if nprocs != num_ranks:
            raise PacelineError(
                "PL955",
                saw=f"The script starts {nprocs} processes by itself, where {num_ranks} ranks are timed.",
                rule="Each rank calls the function of one process of mp.spawn, so there must be as many.",
                fix=f"Ask for {nprocs} ranks. Or let the script use WORLD_SIZE of the environment, if it is "
                "set, for nprocs and the world size.",
            )
        fn(self._rank, *args)
        return None if join else SimpleNamespace(join=lambda timeout=None, grace_period=None: True)

    def _iterate(self, original: Any, loader: Any) -> Iterator[Any]:
        key, size = id(loader), loader.batch_size
        for number, batch in enumerate(original(loader)):
            if os.getpid() == self._pid:
                self._samples[key] = self._samples.get(key, 0.0) + self._count_batch(
                    loader, size, number, batch
                )
                self._last_loader = key
            yield batch

    def _count_batch(self, loader: Any, size: int | None, number: int, batch: Any) -> float:
        """Return a batch's samples: the loader's batch size, but for the last batch of an epoch."""
        if size is not None:
            with suppress(TypeError):  # a data set without a length
                return float(min(size, len(loader.sampler) - number * size))
            return float(size)
        first = _find_tensor(self._torch, batch)
        return float(len(first)) if first is not None and first.dim() else 1.0

    def _enlarge(
        self, original: Any, loader: Any, dataset: Any, batch_size: Any = 1, *args: Any, **kwargs: Any
    ) -> None:
        if batch_size is not None and kwargs.get("batch_sampler") is None:
            batch_size *= self._settings.threads
        original(loader, dataset, batch_size, *args, **kwargs)

    def _build_ddp(self, original: Any, ddp: Any, *args: Any, **kwargs: Any) -> None:
        self._times.bucket_mib = kwargs.get("bucket_cap_mb")
        if self._settings.bucket_mib is not None:
            kwargs["bucket_cap_mb"] = self._settings.bucket_mib
        original(ddp, *args, **kwargs)
        self._modules.append(weakref.ref(ddp))
        self._describe(ddp.module)

    def _forward_ddp(self, original: Any, ddp: Any, *args: Any, **kwargs: Any) -> Any:
        if not ddp.training:
            return ddp.module(*args, **kwargs)
        if self._replicas is None:
            self._replicas = Replicas(self._torch, ddp.module, self._settings.threads)
        return self._replicas(*args, **kwargs)

    def _all_reduce(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        if self._mode == WHOLE or self._trainer is not None:
            return original(*args, **kwargs)
        self._times.left_out += 1
        return _Done() if kwargs.get("async_op") or (len(args) > 3 and args[3]) else None

    def _find_model(self, module: Any, args: Any) -> None:
        """Note the samples of a model whose script has no loader: those of its first tensor."""
        if not module.training or threading.current_thread() is not threading.main_thread():
            return
        self._handle.remove()
        if not self._samples:
            module.register_forward_pre_hook(self._count_forward, prepend=True, with_kwargs=True)
            self._count_forward(module, args, {})

    def _count_forward(self, module: Any, args: Any, kwargs: Any) -> None:
        first = _find_tensor(self._torch, [*args, *kwargs.values()])
        if module.training and first is not None and first.dim():
            self._samples[0] = self._samples.get(0, 0.0) + len(first)

    def _step(self, original: Any, trainer: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        self._meet(trainer)
        taken = original(trainer, batch, *args, **kwargs)
        self._total_samples += taken.num_samples
        self._end_step()
        return taken

    def _open(self, original: Any, loop: Any, share: Any, *args: Any, **kwargs: Any) -> Any:
        if self._trainer is not None:
            self._end_step()  # a step of the user's own loop ends where the next one begins
        self._meet(loop)
        self._total_samples += share.num_samples
        return original(loop, share, *args, **kwargs)

    def _meet(self, trainer: Any) -> None:
        if self._trainer is None:
            self._trainer, model = trainer, next(iter(trainer.models.values()))
            self._times.is_global = True
            self._describe(model)
            if self._settings.threads:
                self._replace_forward(model)

    def _replace_forward(self, model: Any) -> None:
        """Have a model compute in threads; the first replica is the model with its own forward."""
        first = copy.copy(model)  # shares parameters, buffers and parts
        self._replicas = replicas = Replicas(self._torch, first, self._settings.threads)

        def forward(*args: Any, **kwargs: Any) -> Any:
            return replicas(*args, **kwargs) if model.training else first(*args, **kwargs)

        model.forward = forward

    def _describe(self, model: Any) -> None:
        trained = [p for p in model.parameters() if p.requires_grad]
        times = self._times
        times.num_parameters = sum(p.numel() for p in model.parameters())
        times.gradient_bytes = sum(p.numel() * p.element_size() for p in trained)
        times.device = trained[0].device.type if trained else "cpu"

    # ---- steps

    def _on_count(self, count: int) -> None:
        is_main = threading.current_thread() is threading.main_thread()
        if self._trainer is None and is_main and os.getpid() == self._pid:
            self._total_samples += self._samples.get(self._last_loader, 0.0)
            self._samples = dict.fromkeys(self._samples, 0.0)
            self._end_step()

    def _end_step(self) -> None:
        self._times.count += 1
        if self._part is None:
            if self._recorder is not None and self._recorder.is_done:
                self._leave()
            return
        _, steps, counts = self._part
        self._done_in_block += 1
        self._latest = (time.perf_counter(), time.process_time(), self._total_samples)
        if self._done_in_block < steps:
            return
        self._wait_for_device()
        self._latest = (time.perf_counter(), time.process_time(), self._total_samples)
        if counts:
            self._add_block()
        self._done_in_block = 0
        self._part = next(self._plan, None)
        if self._part is None:
            self._end_blocks()
            return
        self._switch(self._part[0])
        dist = sys.modules.get("torch.distributed")
        if dist is not None and dist.is_available() and dist.is_initialized():
            dist.barrier()
        self._block = (time.perf_counter(), time.process_time(), self._total_samples)

    def _add_block(self) -> None:
        assert self._part is not None
        mode, times = self._part[0], self._times
        assert self._block is not None
        values = [
            (end - begin) / self._done_in_block for begin, end in zip(self._block, self._latest, strict=True)
        ]
        for table, value in zip((times.block_s, times.block_cpu_s, times.samples), values, strict=True):
            table.setdefault(mode, []).append(value)

    def _switch(self, mode: str) -> None:
        """Begin or end to compute alone."""
        if mode == self._mode:
            return
        self._mode = mode
        if self._trainer is not None:
            if self._apart is not None:
                self._apart.__exit__(None, None, None)
                self._apart = None
            else:
                self._apart = self._trainer.without_communication()
                self._apart.__enter__()
                self._times.left_out += 1
            return
        for reference in self._modules:
            if (ddp := reference()) is not None:
                ddp.require_backward_grad_sync = mode == WHOLE
                self._times.left_out += 1

    def _wait_for_device(self) -> None:
        if self._torch.cuda.is_initialized():
            self._torch.cuda.synchronize()

    # ---- the end

    def _end_blocks(self) -> None:
        self._switch(WHOLE)
        self._write()
        if not self._settings.record_steps:
            self._leave()
            return
        folder = str(Path(self._settings.folder) / "recording")
        settings = RecordSettings(folder, STEPS.count + 1, self._settings.record_steps)
        self._recorder = StepRecorder(self._rank, settings)
        self._recorder.install(self._torch)

    def _write(self) -> None:
        times = self._times
        times.peak_bytes = STEPS.summarize().peak
        if self._replicas is not None:
            times.moved_bytes = self._replicas.moved_bytes / max(1, times.count)
        write_whole(Path(self._settings.folder) / name_result(self._rank), asdict(times))

    def _finish(self) -> None:
        """Keep what there is of a script that ends before the last block."""
        if self._part is None or os.getpid() != self._pid:
            return
        if self._part[2] and self._block is not None and self._done_in_block >= _LEAST_STEPS:
            self._add_block()
        self._part = None
        self._write()

    def _leave(self) -> None:
        """End this process once all ranks have come so far."""
        folder = Path(self._settings.folder)
        (folder / f"left-{self._rank}").touch()
        until = time.monotonic() + _LEAVE_S
        world_size = int(os.environ.get("WORLD_SIZE", "1"))
        while len(list(folder.glob("left-*"))) < world_size and time.monotonic() < until:
            time.sleep(0.01)
        # Workers of loaders have this process's sockets: the next start may need the same port.
        for child in multiprocessing.active_children():
            child.kill()
            child.join()
        os._exit(0)


class _Done:
    """The handle of an all-reduce that was left out."""

    def wait(self, *args: Any) -> bool:
        """Return at once."""
        return True

    def is_completed(self) -> bool:
        """Return that it is over."""
        return True


def begin(rank: int, table: dict[str, Any]) -> None:
    """Start the timer, as a request of the launcher says."""
    settings = TimeSettings(**{**table["settings"], "modes": tuple(table["settings"]["modes"])})
    if settings.record_steps:
        keep_more_calls()
    when_imported("torch", StepTimer(rank, settings).install)


def name_result(rank: int) -> str:
    """Return the name of a rank's result."""
    return f"times-{rank:04d}.json"


def _find_tensor(torch: Any, value: Any) -> Any:
    """Return the first tensor in a batch."""
    if isinstance(value, torch.Tensor):
        return value
    parts = value.values() if hasattr(value, "values") else value if isinstance(value, (list, tuple)) else ()
    return next((found for part in parts if (found := _find_tensor(torch, part)) is not None), None)
