"""Shows for common variables whether they still work when they are set after `import torch`.

    python benchmarks/import_environment/effects.py

Each line is three fresh processes: the variable set before the import, set after it but before use, and set
after it and applied by a call. A process prints what the variable changes; "-" means that no call is known
or needed. The process without the variable comes first, to show that there is an effect at all.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

LIMIT_S = 100


def _threads() -> str:
    """torch's number in the main thread, in a new one and in one of autograd; those of OpenMP and MKL."""
    import torch

    seen = [torch.get_num_threads()]

    class Ask(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            seen.append(torch.get_num_threads())
            return gradient

    _in_thread(lambda: seen.append(torch.get_num_threads()))
    x = torch.ones(2, requires_grad=True)
    _in_thread(lambda: Ask.apply(x).sum().backward())  # type: ignore[no-untyped-call]
    pools = [
        line.split()[-1] for line in torch.__config__.parallel_info().splitlines() if "max_threads" in line
    ]
    return " ".join(map(str, [*seen, *pools]))


def _workers() -> str:
    """Return the number of OpenMP workers that a matmul starts as the first use of torch by a new thread."""
    import numpy
    import torch

    square = numpy.ones((1500, 1500), numpy.float32)
    started: list[int] = []

    def multiply() -> None:
        before = len(os.listdir("/proc/self/task"))
        torch.from_numpy(square) @ torch.from_numpy(square)
        started.append(len(os.listdir("/proc/self/task")) - before)

    _in_thread(multiply)
    return str(started[0])


def _in_thread(action: Callable[[], object]) -> None:
    thread = threading.Thread(target=action)
    thread.start()
    thread.join()


def _openblas() -> str:
    return str(_openblas_library().scipy_openblas_get_num_threads64_())


def _openblas_library() -> Any:
    """Return the OpenBLAS that numpy has loaded."""
    import ctypes

    import numpy  # noqa: F401

    with open("/proc/self/maps") as maps:
        path = next(line.split(maxsplit=5)[5].strip() for line in maps if "scipy_openblas" in line)
    return ctypes.CDLL(path)


def _set_openblas() -> None:
    _openblas_library().scipy_openblas_set_num_threads64_(int(os.environ["OPENBLAS_NUM_THREADS"]))


def _set_threads() -> None:
    import torch

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or os.environ["MKL_NUM_THREADS"]))


def _debug_level() -> str:
    import torch.distributed as dist

    return str(dist.get_debug_level().name)


def _debug_level_from_env() -> None:
    import torch.distributed as dist

    dist.set_debug_level_from_env()


def _debug_level_in_group() -> str:
    _group()
    return _debug_level()


def _group() -> None:
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)


def _group_error() -> str:
    try:
        _group()
    except RuntimeError:
        return "refused"
    return "accepted"


def _cpp_log_lines() -> str:
    """Return how many lines C++ code logs: what goes to the file descriptor, not to sys.stderr."""
    import tempfile

    with tempfile.TemporaryFile() as file:
        kept = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            _group()
        finally:
            os.dup2(kept, 2)
        file.seek(0)
        return "lines" if file.read().count(b"[I") else "none"


def _init_cpp_log() -> None:
    """c10::initLogging(), which the library exports but Python has no name for."""
    import ctypes

    import torch

    library = os.path.join(os.path.dirname(torch.__file__), "lib", "libc10.so")
    ctypes.CDLL(library)["_ZN3c1011initLoggingEv"]()


def _cpp_stack() -> str:
    import torch

    try:
        torch.ones(2) @ torch.ones(3)
    except RuntimeError as error:
        return "stack" if "C++" in str(error) or "frame #" in str(error) else "message only"
    return "no error"


def _log_level() -> str:
    import logging

    return logging.getLevelName(logging.getLogger("torch.distributed").getEffectiveLevel())


def _init_logs() -> None:
    from torch._logging import _internal

    _internal._init_logs()


def _trace_folder() -> str:
    from torch._logging import _internal

    return str(_internal.LOG_TRACE_HANDLER.root_dir)


def _init_trace() -> None:
    from torch._logging import _internal

    _internal.LOG_TRACE_HANDLER = None
    _internal._init_logs()


def _capability() -> str:
    import torch

    return str(torch.backends.cpu.get_cpu_capability())


def _compile_disabled() -> str:
    import torch._dynamo

    return str(torch._dynamo.config.disable)


def _import_dynamo() -> None:
    import torch._dynamo  # noqa: F401


def _temporary_folder() -> str:
    import tempfile

    return tempfile.gettempdir()


def _forget_temporary_folder() -> None:
    import tempfile

    tempfile.tempdir = None


def _devices() -> str:
    import torch.cuda

    return str(torch.cuda._parse_visible_devices()[:2])


def _hub() -> str:
    import torch

    return torch.hub.get_dir().replace(os.path.expanduser("~"), "~")


def _hugging_face() -> str:
    from huggingface_hub import constants

    return constants.HF_HOME.replace(os.path.expanduser("~"), "~")


@dataclass(frozen=True)
class Check:
    """One variable: what shows its effect, and the call that applies it after the import."""

    name: str
    value: str
    effect: Callable[[], str]
    apply: Callable[[], None] | None = None
    also_import: Callable[[], None] | None = None


CHECKS = {
    "threads": Check("OMP_NUM_THREADS", "1", _threads, _set_threads),
    "more threads than cores": Check("OMP_NUM_THREADS", "64", _threads, _set_threads),
    "first matmul in a new thread": Check("OMP_NUM_THREADS", "1", _workers, _set_threads),
    "threads of MKL": Check("MKL_NUM_THREADS", "1", _threads, _set_threads),
    "threads of OpenBLAS": Check("OPENBLAS_NUM_THREADS", "1", _openblas, _set_openblas),
    "debug level": Check("TORCH_DISTRIBUTED_DEBUG", "DETAIL", _debug_level, _debug_level_from_env),
    "debug level in a group": Check("TORCH_DISTRIBUTED_DEBUG", "DETAIL", _debug_level_in_group),
    "C++ log": Check("TORCH_CPP_LOG_LEVEL", "INFO", _cpp_log_lines, _init_cpp_log),
    "C++ stack in errors": Check("TORCH_SHOW_CPP_STACKTRACES", "1", _cpp_stack),
    "level of a logger": Check("TORCH_LOGS", "+distributed", _log_level, _init_logs),
    "trace folder": Check("TORCH_TRACE", "/tmp/traces", _trace_folder, _init_trace),
    "processor features": Check("ATEN_CPU_CAPABILITY", "default", _capability),
    "compile off": Check("TORCH_COMPILE_DISABLE", "1", _compile_disabled),
    "compile off, dynamo there": Check("TORCH_COMPILE_DISABLE", "1", _compile_disabled, None, _import_dynamo),
    "temporary folder": Check("TMPDIR", "/var/tmp", _temporary_folder),
    "temporary folder, dynamo there": Check(
        "TMPDIR", "/var/tmp", _temporary_folder, _forget_temporary_folder, _import_dynamo
    ),
    "interface of gloo": Check("GLOO_SOCKET_IFNAME", "none0", _group_error),
    "visible devices": Check("CUDA_VISIBLE_DEVICES", "1", _devices),
    "hub folder": Check("TORCH_HOME", "/tmp/hub", _hub),
    "Hugging Face folder": Check("HF_HOME", "/tmp/hf", _hugging_face),
}


def show(title: str, how: str) -> str:
    """Run in one process: set, import and apply in the order that `how` names."""
    check = CHECKS[title]
    if how == "before":
        os.environ[check.name] = check.value
    import torch
    import torch.distributed  # noqa: F401

    if check.also_import:
        check.also_import()
    if how in ("after", "applied"):
        os.environ[check.name] = check.value
    if how == "applied" and check.apply:
        check.apply()
    return check.effect()


def _run(title: str, how: str) -> str:
    env = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    command = [sys.executable, __file__, title, how]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    return done.stdout.strip().splitlines()[-1] if done.returncode == 0 else f"failed: {done.stderr[-300:]}"


def main() -> int:
    """Print the table, or does one check as its child."""
    if len(sys.argv) == 3:
        print(show(sys.argv[1], sys.argv[2]))
        return 0
    print(f"{'what':<32}{'set to':<42}{'without':<22}{'before':<22}{'after':<22}after and applied")
    for title, check in CHECKS.items():
        hows = ["without", "before", "after"] + (["applied"] if check.apply else [])
        values = [_run(title, how) for how in hows]
        values += ["-"] * (4 - len(values))
        print(
            f"{title:<32}{check.name + '=' + check.value:<42}" + "".join(f"{v:<22}" for v in values).rstrip()
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
