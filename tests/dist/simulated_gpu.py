"""A GPU without numbers, for tests on a machine that has none.

Tensors are fake ones of torch whose device is `cuda:0`: operations check shapes, types and devices, and mixing
devices is an error as it is on a GPU. A read of a number gives 1. Copies to the host and reads are recorded with
the line that asks for them, as are copies from memory that is not locked: the host waits for the device in all
of them. Other ranks do not exist: collectives end at once and leave their tensors as they are.
"""

from __future__ import annotations

import contextlib
import ctypes
import traceback
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch._dynamo.trace_rules
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from paceline import world as worlds
from paceline.train.agreement import NUM_SENT
from paceline.world import World

GPU = torch.device("cuda", 0)


class Waits(TorchDispatchMode):
    """Records what the host waits for: `file:function`, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.places: list[str] = []

    def __torch_dispatch__(self, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, call.name()
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if not any(tensor.device.type == "cuda" for tensor in tensors):
            return call(*args, **kwargs)
        if name == "aten::_local_scalar_dense":
            self.note()
            return 1.0 if args[0].is_floating_point() else int(args[0].dtype != torch.bool) or True
        if name in ("aten::nonzero", "aten::masked_select", "aten::unique_consecutive"):
            self.note()
        found = call(*args, **kwargs)
        if name in ("aten::_to_copy", "aten::copy_"):
            source, target = (args[0], found) if name == "aten::_to_copy" else (args[1], args[0])
            is_asynchronous = bool(kwargs.get("non_blocking")) or (name == "aten::copy_" and args[2:3] == (True,))
            if source.device.type != target.device.type and not is_asynchronous:
                self.note()
            if name == "aten::_to_copy" and target.device.type == "cpu":

                with unset_fake_temporarily():
                    numbers = torch.ones(tuple(target.shape), dtype=target.dtype)
                    if numbers.dim() == 1 and len(numbers) > NUM_SENT:
                        numbers[:NUM_SENT] = 0.0  # of an agreement: the rank has nothing to report
                return numbers
        return found

    def note(self) -> None:
        frames = [f for f in traceback.extract_stack() if "/paceline/" in f.filename and "/tests/" not in f.filename]
        if frames:
            path = frames[-1].filename.rpartition("/paceline/")[2]
            self.places.append(f"{path}:{frames[-1].name}")


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


def _make_tensor(waits: Waits, *args: Any, pin_memory: bool = False, **settings: Any) -> Tensor:
    """Make a tensor; this build of torch cannot lock memory."""
    if torch.device(settings.get("device") or "cpu").type == "cuda":
        waits.note()
    return _TENSOR(*args, **settings)


def _backward(tensors: Any, *args: Any, **settings: Any) -> None:
    """Give every leaf that is reached a gradient; the engine itself needs a device."""
    nodes = [tensor.grad_fn for tensor in (tensors if isinstance(tensors, (list, tuple)) else [tensors])]
    seen = set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            leaf.grad = torch.ones_like(leaf) if leaf.grad is None else leaf.grad + 1
            for hook in (leaf._post_accumulate_grad_hooks or {}).values():
                hook(leaf)
        nodes += [following for following, _ in node.next_functions]


def _gather_objects(found: list[Any], own: Any, *args: Any, **settings: Any) -> None:
    found[:] = [own] * len(found)


def _numpy(tensor: Tensor, **settings: Any) -> Any:
    with _disable_current_modes():
        return _NUMPY(tensor, **settings)


_TENSOR, _NUMPY = torch.tensor, Tensor.numpy
torch._dynamo.trace_rules.get_torch_obj_rule_map()  # it reads names that are replaced below
_CUDA = {
    "get_rng_state": lambda *args: torch.zeros(16, dtype=torch.uint8),
    "get_device_name": lambda *args: "NVIDIA H100",
    "get_device_properties": lambda *args: SimpleNamespace(name="NVIDIA H100", total_memory=80 << 30),
    "current_device": lambda: 0,
    "default_generators": (_Anything(),),
    "is_current_stream_capturing": lambda: False,
    "current_stream": _Anything,
    "default_stream": _Anything,
    "stream": _Anything,
    "device": _Anything,
    "Stream": _Anything,
    "Event": _Anything,
    **dict.fromkeys(("set_rng_state", "manual_seed", "manual_seed_all", "synchronize", "set_device"), lambda *a: None),
    **dict.fromkeys(("max_memory_allocated", "max_memory_reserved", "memory_allocated"), lambda *a: 1 << 20),
    "reset_peak_memory_stats": lambda *args: None,
}


@cache
def _set_guard() -> list[Any]:
    """Let torch accept CUDA devices in autograd; returns what must stay in memory.

    torch has a guard that does nothing, and puts it in the place of one that counts no devices. This build has
    none at all, so one whose every method returns 0 is put there first.
    """
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
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
def simulated_gpu(world_size: int = 1, rank: int = 0) -> Iterator[Waits]:
    """Let this process be a rank whose device is a GPU without numbers."""
    _set_guard()
    waits = Waits()
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    world = World(
        rank=rank,
        local_rank=0,
        world_size=world_size,
        local_world_size=1,
        node_rank=rank,
        num_nodes=world_size,
        device=GPU,
        backend="fake",
        launcher="torchrun" if world_size > 1 else "single",
        timeout_s=10,
        seed=0,
        deterministic=True,
    )
    worlds._current.append(world)
    try:
        with (
            mock.patch("torch.tensor", partial(_make_tensor, waits)),
            mock.patch("torch.autograd.backward", _backward),
            mock.patch.object(Tensor, "backward", _backward),
            mock.patch.object(Tensor, "numpy", _numpy),
            mock.patch.object(Tensor, "pin_memory", lambda self: self),
            mock.patch.object(dist, "all_gather_object", _gather_objects),
            mock.patch.object(dist, "broadcast_object_list", lambda *args, **settings: None),
            mock.patch.multiple("torch.cuda", **_CUDA),
            mock.patch.object(Tensor, "uniform_", lambda self, *args, **settings: self),
            mock.patch.object(Tensor, "normal_", lambda self, *args, **settings: self),
            mock.patch.object(torch.nn.Module, "_apply", lambda self, *args, **settings: self),
            FakeTensorMode(allow_non_fake_inputs=True),
            waits,
        ):
            yield waits
    finally:
        worlds._current.remove(world)
        dist.destroy_process_group()
