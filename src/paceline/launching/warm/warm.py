"""The warm start: packages imported once, before ranks are forked, and hidden from the script until it asks.

A script that starts cold imports torch after its own first lines, and those may set variables that torch,
numpy or the libraries under them read while they are imported. After the fork, these packages are therefore
removed from `sys.modules`, and the first `import` of one restores it. At that moment, the environment is
compared with that at its import. What differs and matters is applied again where that is possible
(`REAPPLIED`); where it is not, the rank starts over, cold.
"""

from __future__ import annotations

import functools
import gc
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import ModuleType
from typing import Any

from paceline.launching.rank.openblas import OPENBLAS_THREADS, set_openblas_threads
from paceline.launching.warm.import_environment import (
    PREFIXES_READ_AT_IMPORT,
    READ_AT_IMPORT,
    READ_AT_LOAD_WITH_CUDA,
)
from paceline.torch_seams.gloo_threads import await_gloo_threads
from paceline.torch_seams.starting import read_log_settings

_DYNAMO = "torch._dynamo"


class Warmth:
    """The packages that a process has imported ahead for the ranks that will be forked from it.

    Attributes:
        environ: the environment that the script finds, or until then that of the import.
    """

    def __init__(self) -> None:
        self.environ = dict(os.environ)
        self._before = set(sys.modules)

    def load(self, names: Iterable[str]) -> None:
        """Import modules; those that this torch does not have are left to the script.

        Objects loaded then are excluded from garbage collection, here and in forks: scanning torch's takes a
        tenth of a second, and would copy their memory pages in every rank.
        """
        collecting = gc.isenabled()
        gc.disable()  # a sixth of the time of importing torch
        try:
            with _one_thread_in_openblas():
                for name in names:
                    with suppress(ImportError):
                        importlib.import_module(name)
        finally:
            gc.freeze()
            if collecting:
                gc.enable()

    def hide(self, restart: Callable[[list[str]], None]) -> None:
        """Hide the packages in a forked rank until they are imported.

        Args:
            restart: called with the variables that came too late; it must not return.
        """
        # The launcher has set variables meanwhile (RANK and the like); the script has not.
        self.environ = dict(os.environ)
        tempfile.tempdir = None  # it goes by the environment, and is kept from the first question on
        hidden: dict[str, dict[str, ModuleType]] = {}
        for package in {name.partition(".")[0] for name in set(sys.modules) - self._before}:
            root = sys.modules.get(package)
            # Modules that compiled extensions share among themselves have no spec, and must stay.
            if (
                package in sys.stdlib_module_names
                or package == "paceline"
                or root is None
                or not root.__spec__
            ):
                continue
            # Copy to a list first: another thread of the script may import meanwhile.
            names = [name for name in list(sys.modules) if name == package or name.startswith(f"{package}.")]
            hidden[package] = {name: sys.modules.pop(name) for name in names}
        sys.meta_path.insert(0, _HiddenPackageFinder(hidden, self._settle, restart))

    def _settle(self, package: str, restart: Callable[[list[str]], None]) -> None:
        """Compare the environment when a package is imported; restart the rank if it cannot be fixed."""
        late = sorted(
            name for name in _names_read_by(package) if os.environ.get(name) != self.environ.get(name)
        )
        for name in late:
            if name in REAPPLIED:
                REAPPLIED[name]()
        rest = [name for name in late if name not in REAPPLIED]
        if rest:
            restart(rest)
        # Unless the script seeds them, each rank must have its own random numbers, as separate processes do.
        if package == "numpy":
            set_openblas_threads()
            if "numpy.random" in sys.modules:
                sys.modules["numpy.random"].seed()
        elif package == "torch":
            sys.modules["torch"].default_generator.seed()
            _rest_before_destroying_groups()


def _names_read_by(package: str) -> set[str]:
    names = set(READ_AT_IMPORT.get(package, ()))
    if package == "torch":
        if _DYNAMO in sys.modules:
            names |= READ_AT_IMPORT[_DYNAMO]
        if sys.modules["torch"].version.cuda is not None:
            names |= READ_AT_LOAD_WITH_CUDA
    if package in ("torch", "tqdm"):
        names |= {name for name in os.environ if name.startswith(PREFIXES_READ_AT_IMPORT)}
    return names


class _HiddenPackageFinder(importlib.abc.MetaPathFinder):
    """The finder of hidden packages, which comes first; importing one restores all its modules."""

    def __init__(
        self,
        hidden: dict[str, dict[str, ModuleType]],
        settle: Callable[[str, Callable[[list[str]], None]], None],
        restart: Callable[[list[str]], None],
    ) -> None:
        self._hidden = hidden
        self._settle = settle
        self._restart = restart
        self._lock = threading.RLock()

    def find_spec(
        self, name: str, path: Any = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        module = self._hidden.get(name.partition(".")[0], {}).get(name)
        if module is None:
            return None
        known = module.__spec__
        spec = importlib.machinery.ModuleSpec(name, _Revealed(self, module))
        if known is not None:
            spec.origin = known.origin
            spec.submodule_search_locations = known.submodule_search_locations
        return spec

    def reveal(self, name: str) -> None:
        package = name.partition(".")[0]
        with self._lock:
            modules = self._hidden.pop(package, None)
            if modules is None:
                return
            sys.modules.update(modules)
            if not self._hidden:
                sys.meta_path.remove(self)
            self._settle(package, self._restart)


class _Revealed(importlib.abc.Loader):
    def __init__(self, finder: _HiddenPackageFinder, module: ModuleType) -> None:
        self._finder = finder
        self._module = module
        self._spec = module.__spec__

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        self._finder.reveal(spec.name)
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # the import has put its own there


# ---- whether a fork is safe


def why_not_fork() -> str | None:
    """Return the reason why forking this process would not be safe."""
    num_tasks = len(os.listdir("/proc/self/task"))
    if num_tasks > 1:
        threads = "a thread" if num_tasks == 2 else f"{num_tasks - 1} threads"
        return f"importing torch has started {threads} here, which a fork would lose"
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "importing torch has started CUDA here, which does not survive a fork"
    return None


# ---- settings that can be applied again


def _reapply_debug_level() -> None:
    import torch.distributed as dist

    dist.set_debug_level_from_env()  # type: ignore[attr-defined]


def _nothing_to_do() -> None:
    """Do nothing, for settings that `hide` or `set_openblas_threads` applies."""


# OMP_NUM_THREADS is not among them: torch accepts a new number, but in some operators the threads that the
# script starts itself keep the number of the import (benchmarks/import_environment).
REAPPLIED: Mapping[str, Callable[[], None]] = {
    "TORCH_DISTRIBUTED_DEBUG": _reapply_debug_level,
    OPENBLAS_THREADS: _nothing_to_do,
    **dict.fromkeys(
        ("TORCH_LOGS", "TORCH_LOGS_OUT", "TORCH_LOGS_FORMAT", "TORCH_LOGS_TRACE_ID_FILTER"), read_log_settings
    ),
    **dict.fromkeys(("TMPDIR", "TEMP", "TMP"), _nothing_to_do),
}


def _rest_before_destroying_groups() -> None:
    """Keep a DDP script that ends right after its last collective from hanging in torch (`gloo_threads`).

    Nothing forbids it without us, but in forks of the warm process it was seen in 4 of 20 runs of such a
    script, and in none of 31 cold ones.
    """
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d

    destroy = c10d.destroy_process_group

    @functools.wraps(destroy)
    def destroy_process_group(group: Any = None) -> None:
        await_gloo_threads()
        destroy(group)

    c10d.destroy_process_group = dist.destroy_process_group = destroy_process_group


@contextmanager
def _one_thread_in_openblas() -> Iterator[None]:
    """Give OpenBLAS one thread while numpy loads, because its threads would not survive a fork."""
    before = os.environ.get(OPENBLAS_THREADS)
    os.environ[OPENBLAS_THREADS] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[OPENBLAS_THREADS]
        else:
            os.environ[OPENBLAS_THREADS] = before
