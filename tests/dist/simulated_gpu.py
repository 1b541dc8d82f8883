"""A GPU without numbers, for tests on a machine that has none.

Tensors of `cuda:0` are fake ones of torch: operations check shapes, types and devices, and mixing devices is
an error as it is on a GPU. Tensors of the CPU are real. A read of a number gives 1. Copies to the host and
reads are recorded with the line that asks for them, as are copies from memory that is not locked: the host
waits for the device in all of them. Backward is torch's own, with the hooks of DDP and FSDP. Other ranks do
not exist: collectives end at once and leave their tensors as they are. `streams.py` finds races between
streams.
"""

from __future__ import annotations

import contextlib
import ctypes
import traceback
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, TypeVar
from unittest import mock

import torch
import torch._dynamo.trace_rules
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

import paceline.parallel.replicate  # noqa: F401 (it names torch's futures, which are replaced below)
from paceline import world as worlds
from paceline.parallel.stages.transfer import StrideOrder
from paceline.torch_seams.tensors import is_fake
from paceline.train.agreement import NUM_SENT
from paceline.world import World
from tests.dist.streams import Event, Stream, Streams

GPU = torch.device("cuda", 0)
_LIBRARIES = Path(torch.__file__).parent / "lib"
_T = TypeVar("_T")
_COPIES = ("aten::_to_copy", "aten::copy_")


class Waits(TorchDispatchMode):
    """Records what the host waits for: `file:function`, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.places: list[str] = []
        self.streams = Streams()
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)

    def __torch_dispatch__(self, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, call.name()
        if not any(map(_is_on_gpu, tree_leaves((args, kwargs)))):
            return call(*args, **kwargs)
        if name.startswith("c10d::"):
            given = [
                leaf for leaf in tree_leaves((args, kwargs)) if _is_on_gpu(leaf) and isinstance(leaf, Tensor)
            ]
            self.streams.use(self.streams.current(), [], given)
            return self._send(call, args, kwargs)
        if name == "aten::_local_scalar_dense":
            self.note()
            return 1.0 if args[0].is_floating_point() else int(args[0].dtype != torch.bool) or True
        if name == "aten::equal":
            self.note()
            return False
        if name in ("aten::nonzero", "aten::masked_select", "aten::unique_consecutive"):
            self.note()
        if name not in _COPIES:
            with self._fake:
                found = call(*args, **kwargs)
            self.streams.run(call, args, kwargs, found)
            return found
        source = args[name == "aten::copy_"]
        target = (
            torch.device(kwargs.get("device") or source.device)
            if name == "aten::_to_copy"
            else args[0].device
        )
        is_asynchronous = bool(kwargs.get("non_blocking")) or (name == "aten::copy_" and args[2:3] == (True,))
        if source.device.type != target.type and not is_asynchronous:
            self.note()
        if source.device.type == "cuda" and target.type == "cpu":
            self.streams.use(self.streams.current(), [source], [])
            if not is_asynchronous:
                self.streams.synchronize()
            numbers = _read(source)
            return args[0].copy_(numbers) if name == "aten::copy_" else numbers.to(kwargs.get("dtype"))
        with self._fake:
            found = call(*args, **kwargs)
        self.streams.run(call, args, kwargs, found)
        if source.device.type == "cpu" and not source.is_floating_point():
            found.sent = source.clone()  # the order of DDP's buckets goes there and back
        return found

    def _send(self, call: Any, args: Any, kwargs: Any) -> Any:
        """Return what a collective returns; it ends at once."""
        real = tree_map(
            lambda leaf: torch.empty(leaf.shape, dtype=leaf.dtype) if isinstance(leaf, Tensor) else leaf,
            (args, kwargs),
        )
        found = call(*real[0], **real[1])
        return (args[0], *found[1:]) if isinstance(found, tuple) and len(found) > 1 else found

    def is_trial(self, tensor: Tensor) -> bool:
        """Return whether a tensor has no numbers, and is none of this GPU."""
        return is_fake(tensor) and getattr(tensor, "fake_mode", None) is not self._fake

    def note(self) -> None:
        self.streams.synchronize()
        frames = [
            f for f in traceback.extract_stack() if "/paceline/" in f.filename and "/tests/" not in f.filename
        ]
        if frames:
            path = frames[-1].filename.rpartition("/paceline/")[2]
            self.places.append(f"{path}:{frames[-1].name}")


def _is_on_gpu(leaf: Any) -> bool:
    device = leaf.device if isinstance(leaf, Tensor) else leaf
    return isinstance(device, torch.device) and device.type == "cuda"


def _read(source: Tensor) -> Tensor:
    """Return what the host gets of a tensor on the device."""
    if hasattr(source, "sent"):
        return source.sent
    numbers = torch.ones(source.shape, dtype=source.dtype)
    num_sent = NUM_SENT * dist.get_world_size()
    if numbers.dim() == 1 and len(numbers) > num_sent:
        numbers[:num_sent] = 0.0  # of an agreement: no rank has anything to report
    return numbers


class _Anything:
    """A stream or an event: every method does nothing."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **settings: None

    def __enter__(self) -> _Anything:
        return self

    def __exit__(self, *error: object) -> None:
        pass


class _Future(torch.futures.Future[_T]):
    """A future that does not look for the memory of its tensors."""

    streams: Streams
    pending: ClassVar[list[Event]] = []

    def __init__(self, *, devices: Any = None) -> None:
        super().__init__()

    def set_result(self, result: _T) -> None:
        if not self.pending and torch._C._current_graph_task_id() >= 0:
            torch.autograd.Variable._execution_engine.queue_callback(self.await_all)
        self.pending.append(self.streams.current().record_event())
        super().set_result(result)

    @classmethod
    def await_all(cls) -> None:
        """Wait as DDP does at the end of a backward; its own callback comes after this one."""
        for event in cls.pending:
            event.wait()
        cls.pending.clear()


class _Sum:
    """An all-reduce under way on a stream of its own; NCCL keeps the tensor until it is waited for."""

    def __init__(self, streams: Streams, tensor: Tensor) -> None:
        self._streams, self._tensor, self._stream = streams, tensor, Stream(streams)
        self._stream.wait_stream(streams.current())
        streams.use(self._stream, [], [tensor])

    def wait(self) -> bool:
        self._streams.current().wait_stream(self._stream)
        return True

    def get_future(self) -> _Future[list[Tensor]]:
        future: _Future[list[Tensor]] = _Future()
        with self._streams.within(self._stream):
            future.set_result([self._tensor])
        return future


def _all_reduce(waits: Waits) -> Any:
    def all_reduce(tensor: Tensor, *args: Any, async_op: bool = False, **settings: Any) -> _Sum | None:
        if not _is_on_gpu(tensor):
            return _Sum(waits.streams, torch.zeros((), device=GPU)) if async_op else None
        if async_op:
            return _Sum(waits.streams, tensor)
        waits.streams.use(waits.streams.current(), [], [tensor])
        return None

    return all_reduce


def _make_tensor(*args: Any, pin_memory: bool = False, device: Any = None, **settings: Any) -> Tensor:
    """Make a tensor; this build of torch cannot lock memory."""
    made = _TENSOR(*args, **settings)
    return made if device is None else made.to(device)


def _gather_objects(found: list[Any], own: Any, *args: Any, **settings: Any) -> None:
    found[:] = [own] * len(found)


def _read_order(waits: Waits) -> Callable[[StrideOrder], list[int]]:
    """Return what reads the order in memory of a gradient; a read of numbers gives none."""

    def read(order: StrideOrder) -> list[int]:
        if order.dims is None:
            assert order.first is not None
            waits.note()
            order.dims = list(range(len(order.first.form.shape)))
        return order.dims

    return read


_TENSOR = torch.tensor
torch._dynamo.trace_rules.get_torch_obj_rule_map()  # it reads names that are replaced below
_CUDA = {
    "is_initialized": lambda: True,
    "get_rng_state": lambda *args: torch.zeros(16, dtype=torch.uint8),
    "get_device_name": lambda *args: "NVIDIA H100",
    "get_device_properties": lambda *args: SimpleNamespace(
        name="NVIDIA H100", total_memory=80 << 30, major=9, minor=0, multi_processor_count=132
    ),
    "current_device": lambda: 0,
    "default_generators": (_Anything(),),
    "is_current_stream_capturing": lambda: False,
    "device": _Anything,
    **dict.fromkeys(("set_rng_state", "manual_seed", "manual_seed_all"), lambda *args: None),
    **dict.fromkeys(("set_device", "reset_peak_memory_stats"), lambda *args: None),
    **dict.fromkeys(("max_memory_allocated", "max_memory_reserved", "memory_allocated"), lambda *a: 1 << 20),
}


@cache
def _set_guard() -> list[Any]:
    """Let torch accept CUDA devices in autograd; returns what must stay in memory.

    torch has a guard that does nothing, and puts it in the place of one that counts no devices. This build
    has none at all, so one whose every method returns 0 is put there first.
    """
    library = ctypes.CDLL(str(_LIBRARIES / "libc10.so"))
    registry = (ctypes.c_void_p * 8).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    kept: list[Any] = [ctypes.CFUNCTYPE(ctypes.c_int)(lambda: 0)]
    if registry[1] is None:  # CUDA's place
        methods = (ctypes.c_void_p * 64)(*[ctypes.cast(kept[0], ctypes.c_void_p).value] * 64)
        guard = ctypes.c_void_p(ctypes.addressof(methods))
        kept += [methods, guard]
        registry[1] = ctypes.addressof(guard)
        torch._C._ensureCUDADeviceGuardSet()
    return kept


@contextlib.contextmanager
def _with_accelerator() -> Iterator[None]:
    """Let torch's engine of backward take CUDA for the accelerator of this build.

    It asks an object that this build has in the place of CUDA's, whose first methods are whether CUDA is
    built and available, and whether a device has been used.
    """
    find = ctypes.CDLL(str(_LIBRARIES / "libtorch_cpu.so"))._ZN2at6detail12getCUDAHooksEv
    find.restype = ctypes.c_void_p
    hooks = ctypes.cast(find(), ctypes.POINTER(ctypes.c_void_p))
    before, yes = hooks[0], ctypes.CFUNCTYPE(ctypes.c_bool)(lambda: True)
    assert before is not None
    methods = (ctypes.c_void_p * 64)(*(ctypes.c_void_p * 64).from_address(before))
    methods[2] = methods[3] = methods[4] = ctypes.cast(yes, ctypes.c_void_p).value
    hooks[0] = ctypes.addressof(methods)
    try:
        yield
    finally:
        hooks[0] = before


@contextlib.contextmanager
def simulated_gpu(world_size: int = 1, rank: int = 0) -> Iterator[Waits]:
    """Let this process be a rank whose device is a GPU without numbers."""
    _set_guard()
    waits = Waits()
    streams = _Future.streams = waits.streams
    cuda = {
        "current_stream": streams.current,
        "default_stream": lambda *args: streams.default,
        "stream": streams.within,
        "Stream": lambda *args, **settings: Stream(streams),
        "Event": lambda *args, **settings: Event(streams),
        "synchronize": streams.synchronize,
    }
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=dist.HashStore())
    world = World(
        rank=rank,
        local_rank=0,
        world_size=world_size,
        local_world_size=1,
        node_rank=rank,
        num_nodes=world_size,
        device=GPU,
        backend="cpu:gloo,cuda:nccl",
        launcher="torchrun" if world_size > 1 else "single",
        timeout_s=10,
        seed=0,
        deterministic=True,
    )
    worlds._current.append(world)
    try:
        with (
            _with_accelerator(),
            torch.autograd.set_multithreading_enabled(False),  # a thread per device would need a device
            mock.patch("torch.tensor", _make_tensor),
            mock.patch("torch.futures.Future", _Future),
            mock.patch.object(Tensor, "pin_memory", lambda tensor: tensor),
            mock.patch.object(Tensor, "record_stream", lambda tensor, stream: streams.record(tensor, stream)),
            mock.patch.object(c10d.Logger, "set_runtime_stats_and_log", return_value=None),
            # It counts the forwards that DDP times, in a build for CUDA by events of its driver.
            mock.patch.object(c10d.Reducer, "prepare_for_forward", return_value=None),
            mock.patch.object(dist, "all_reduce", _all_reduce(waits)),
            mock.patch.object(dist, "all_gather_object", _gather_objects),
            mock.patch.object(dist, "broadcast_object_list", return_value=None),
            mock.patch.object(StrideOrder, "read", _read_order(waits)),
            mock.patch.multiple("torch.cuda", **_CUDA | cuda),
            waits,
        ):
            yield waits
    finally:
        worlds._current.remove(world)
        dist.destroy_process_group()
