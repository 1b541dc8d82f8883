"""Measures which environment variables numpy and torch read while they are imported.

    python tools/measure_import_environment.py             # prints the table
    python tools/measure_import_environment.py --write     # also writes the module and the results
    python tools/measure_import_environment.py --json --no-c --only torch

A variable that is read at import is fixed from then on: a process that was forked after the import can't
change it with os.environ. Each package is imported in a fresh process with a small, fixed environment.
Reads by Python are seen by a recording os.environ, reads by C code by a getenv put before the one of libc.
Afterwards the process uses what it imported, which shows the variables that are read again.

Not detected: a C library that scans `environ` by itself, or a variable that is read only if another
one is set. Of the libraries here, only libtorch_cpu refers to `environ` (`nm -D`).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
MODULE = ROOT / "src/paceline/launching/warm/import_environment.py"
RESULTS = ROOT / "benchmarks/import_environment/results.txt"
COMMAND = "python tools/measure_import_environment.py --write"
PACKAGES = ("numpy", "torch")
PHASES = ("numpy", "torch", "torch._dynamo")
USE = "use"  # the phase after the imports
# Names that an earlier torch of those supported reads too, by phase, from `--json` run with torch 2.11.0
# and 2.12.0 in their builds for CUDA. The module lists them beside what is measured.
READ_BY_EARLIER_TORCH = {
    "torch": {"TORCH_SYMMMEM", "TORCH_VITAL"},
    "torch._dynamo": {"TORCHINDUCTOR_ENABLE_TLX_TEMPLATES", "TORCHINDUCTOR_FORCE_SAME_PRECISION"},
}
COPY = "*"  # stands for the names when the whole environment is read
LOG = "PACELINE_GETENV_LOG"
LIMIT_S = 120
# All that the measured process gets: the names of interest are unset, as they are for most people.
KEPT = ("PATH", "HOME", "LD_LIBRARY_PATH")
# Their callers are the readers.
PASSED_THROUGH = ("os", "posixpath", "getpass", "collections.abc", "_collections_abc")

# Names that are left out, as regular expressions, with the reason. TMPDIR is not among them: tempfile keeps
# its first answer, and torch._dynamo asks for one while it is imported.
LEFT_OUT = {
    r"_?PYTHON.*": "Python read them when it started, before the first line of any script; sysconfig reads "
    "two again for paths that no training uses",
    r"LD_.*": "the dynamic loader read them when the process started",
    r"LC_.*|LANG|LANGUAGE|LOCPATH|NLSPATH|GCONV_PATH": "Python set the locale when it started",
    r"MALLOC_.*|GLIBC_TUNABLES": "malloc reads them at the first allocation, before any script",
    r"TERM|COLUMNS|LINES|NO_COLOR|FORCE_COLOR": "about the terminal alone",
    r"TZ": "libc reads it with each tzset()",
    r"PATH": "read with each search for a program, nothing keeps it",
}
# HOME is read by sysconfig alone, for the folder of the user's packages; whoever else expands "~" at import
# would show in the table.
LEFT_OUT_READERS = ("sysconfig", "site")

INTERPOSER = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

extern char **environ;

static char *find(const char *name) {
    size_t length = strlen(name);
    for (char **entry = environ; entry && *entry; entry++)
        if (!strncmp(*entry, name, length) && (*entry)[length] == '=') return *entry + length + 1;
    return NULL;
}

/* One write per line to a file opened for appending: lines of several threads don't mix. */
static void note(const char *name, void *caller) {
    const char *log = find("PACELINE_GETENV_LOG");
    if (!log) return;
    Dl_info info;
    const char *library = dladdr(caller, &info) && info.dli_fname ? info.dli_fname : "?";
    char line[2048];
    int length = snprintf(line, sizeof line, "%d\t%s\t%s\n", (int)getpid(), name, library);
    if (length <= 0 || (size_t)length >= sizeof line) return;
    int file = open(log, O_WRONLY | O_APPEND | O_CLOEXEC);
    if (file < 0) return;
    if (write(file, line, length) != length) _exit(97);
    close(file);
}

char *getenv(const char *name) { note(name, __builtin_return_address(0)); return find(name); }
char *secure_getenv(const char *name) { note(name, __builtin_return_address(0)); return find(name); }
"""


# What the generated module says besides the measured names. The part on CUDA and the calls are by hand.
TEMPLATE = '''"""Environment variables that numpy and torch read while imported. Generated: don't edit.

    @COMMAND@

Measured with @VERSIONS@,
and with the names that torch 2.11 and 2.12 read besides.
In a process that imported them, a script that sets such a variable is too late: the old value counts.
Other variables are read when they are used, if at all, so setting them after the import is early enough.
"""

from __future__ import annotations


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# By the import that reads them, Python and C code together. torch imports numpy, so "torch" has the names
# of "numpy" too. torch.optim imports torch._dynamo with the first optimizer.
READ_AT_IMPORT: dict[str, frozenset[str]] = {
@ENTRIES@
}

# Not measured: by hand, from the sources of torch. In a CUDA build a static initializer of the caching
# allocator reads the backend (native or cudaMallocAsync) from these when the library is loaded. The other
# options in them are read at the first use of the allocator, but a value can hold both.
READ_AT_LOAD_WITH_CUDA: frozenset[str] = frozenset(
    {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"}
)

# tqdm, which torch.hub imports where it is installed, goes through the whole environment for its defaults.
PREFIXES_READ_AT_IMPORT: tuple[str, ...] = ("TQDM_",)

# These can be applied after the import, in the process that uses them (benchmarks/import_environment):
#
#   TORCH_DISTRIBUTED_DEBUG   torch.distributed.set_debug_level_from_env(). C code reads the variable again in
#                             use, but that doesn't set the level.
#   OMP_NUM_THREADS,          torch.set_num_threads(n) in the main thread, before any work: torch, OpenMP as
#   MKL_NUM_THREADS           torch uses it, MKL and oneDNN follow, in threads of autograd too. Not exact:
#                             - a thread that the script starts takes n with its first parallel loop of torch
#                               or torch.get_num_threads(); a matmul or convolution before that still takes
#                               the value of the import, which libgomp keeps for new threads;
#                             - at import MKL (unless MKL_DYNAMIC=FALSE) takes at most one thread for each
#                               core, the call takes any n: so take min(n, what an import without both gives);
#                             - at import MKL_NUM_THREADS goes before OMP_NUM_THREADS.
#   OPENBLAS_NUM_THREADS      scipy_openblas_set_num_threads64_(n) by ctypes, in the OpenBLAS that numpy
#                             brings (path in /proc/self/maps). Without it OpenBLAS goes by OMP_NUM_THREADS.
#   TORCH_CPP_LOG_LEVEL       c10::initLogging() by ctypes: _ZN3c1011initLoggingEv in torch/lib/libc10.so
#   TORCH_LOGS, TORCH_LOGS_OUT, TORCH_LOGS_FORMAT, TORCH_LOGS_TRACE_ID_FILTER
#                             torch._logging._internal._init_logs()
#   TORCH_TRACE, TORCH_DTRACE the same, after torch._logging._internal.LOG_TRACE_HANDLER = None
#   TMPDIR, TEMP, TMP         tempfile.tempdir = None (only torch._dynamo asks for it at import)
#
# torch._dynamo also writes at import: it sets TORCHINDUCTOR_CACHE_DIR in os.environ where it is not set, and
# keeps the working folder of that moment for its debug files.
'''


class RecordingEnviron(os._Environ):  # type: ignore[type-arg]
    """os.environ that notes each name that is asked for, and by which package."""

    reads: set[tuple[str, str, str]] = set()  # noqa: RUF012 - the class stands for the one os.environ
    phase = ""
    bulk = 0

    def __getitem__(self, key: str) -> str:
        """Notes a read of one name. A copy of the whole environment is not a read of its names."""
        reader = _reader(sys._getframe(1))
        self.reads.add((self.phase, COPY if type(self).bulk else str(key), reader))
        return super().__getitem__(key)

    def __iter__(self) -> Iterator[str]:
        """While the names are gone through, reads belong to a copy of the whole environment."""
        type(self).bulk += 1
        try:
            yield from super().__iter__()
        finally:
            type(self).bulk -= 1


def _reader(frame: FrameType | None) -> str:
    """Return the top-level package that reads, past the methods of os.environ itself."""
    while frame is not None:
        name = str(frame.f_globals.get("__name__", "?"))
        if name not in PASSED_THROUGH:
            return "script" if name == "__main__" else name.split(".")[0]
        frame = frame.f_back
    return "?"


def record(package: str) -> dict[str, Any]:
    """Import and uses `package` in this process; return what Python code read."""
    os.environ.__class__ = RecordingEnviron
    for phase, action in (NUMPY_PHASES if package == "numpy" else TORCH_PHASES).items():
        RecordingEnviron.phase = phase
        if log := os.environb._data.get(LOG.encode()):  # type: ignore[attr-defined]
            with open(log, "a") as file:
                file.write(f"== {phase} {os.getpid()}\n")
        action()
    import importlib

    return {"version": importlib.import_module(package).__version__, "reads": sorted(RecordingEnviron.reads)}


def _import_numpy() -> None:
    import numpy  # noqa: F401


def _use_numpy() -> None:
    import numpy

    rng = numpy.random.default_rng(0)
    matrix = rng.standard_normal((512, 512))
    numpy.linalg.solve(matrix @ matrix.T, matrix)


def _import_torch() -> None:
    import torch
    import torch.distributed  # noqa: F401


def _import_dynamo() -> None:
    import torch._dynamo  # noqa: F401 - torch.optim imports it with the first optimizer


def _use_torch() -> None:
    """Threads, oneDNN, MKL, a process group of one rank, DDP and an optimizer."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(8 * 30 * 30, 10)
    )
    replicated = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(replicated.parameters())
    (replicated(torch.randn(16, 3, 32, 32)).logsumexp(1).mean()).backward()
    optimizer.step()
    square = torch.randn(1024, 1024)
    torch.linalg.solve(square @ square.T, square)
    dist.all_reduce(square)
    # Kept, with its group. Dropped so soon after its backward, DDP can hang: it waits for gloo's thread,
    # with Python's lock in its hands, and that thread waits for the lock.
    _KEPT.append(replicated)
    if torch.cuda.is_available():
        (square.cuda() @ square.cuda()).cpu()


_KEPT: list[object] = []
NUMPY_PHASES: dict[str, Callable[[], None]] = {"numpy": _import_numpy, USE: _use_numpy}
TORCH_PHASES: dict[str, Callable[[], None]] = {
    "torch": _import_torch,
    "torch._dynamo": _import_dynamo,
    USE: _use_torch,
}


@dataclass(frozen=True, order=True)
class Read:
    """One variable, read in one phase by one reader."""

    phase: str
    name: str
    language: str  # "python" or "c"
    by: str  # the top-level package or the file name of the library


def measure(package: str, with_c: bool = True) -> tuple[str, list[Read]]:
    """Return the version of `package` and all reads while it is imported and used in a fresh process."""
    env = {name: os.environ[name] for name in KEPT if name in os.environ}
    with tempfile.TemporaryDirectory(prefix="paceline-") as folder:
        log = Path(folder, "log")
        if with_c:
            log.touch()
            env |= {LOG: str(log), "LD_PRELOAD": str(_compile(Path(folder)))}
        result = _child(package, env)
        reads = {Read(phase, name, "python", by) for phase, name, by in result["reads"]}
        if with_c:
            reads |= set(_c_reads(log.read_text(errors="replace")))
    return str(result["version"]), sorted(read for read in reads if not _left_out(read))


def _child(package: str, env: dict[str, str]) -> dict[str, Any]:
    """Run `record` in a fresh process."""
    command = [sys.executable, str(Path(__file__).resolve()), "--record", package]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    if done.returncode:
        raise RuntimeError(f"importing {package} failed with code {done.returncode}:\n{done.stderr}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def _compile(folder: Path) -> Path:
    """Build the library that stands before libc's getenv."""
    source, library = folder / "getenv.c", folder / "getenv.so"
    source.write_text(INTERPOSER)
    command = ["cc", "-O2", "-fPIC", "-shared", "-o", str(library), str(source), "-ldl"]
    subprocess.run(command, check=True, timeout=LIMIT_S)
    return library


def _c_reads(log: str) -> Iterator[Read]:
    """The reads of the measured process itself: programs that it started wrote to the same log."""
    phase = process = ""
    for line in log.splitlines():
        if line.startswith("== "):
            _, phase, process = line.split()
            continue
        pid, name, library = line.split("\t")
        if phase and pid == process:
            yield Read(phase, name, "c", os.path.basename(library))


def _left_out(read: Read) -> bool:
    """Return whether a read is of no interest; see LEFT_OUT."""
    return read.by in LEFT_OUT_READERS or any(re.fullmatch(rule, read.name) for rule in LEFT_OUT)


def table(reads: list[Read]) -> list[str]:
    """One line for each variable that is read at an import, and who reads it then and later."""
    lines = []
    for phase in sorted({read.phase for read in reads} - {USE}, key=PHASES.index):
        for name in sorted({read.name for read in reads if read.phase == phase and read.name != COPY}):
            now = _readers(reads, phase, name)
            later = _readers(reads, USE, name)
            lines.append(f"{phase:<14} {name:<62} {now:<52} {later or '-'}")
    return lines


def _readers(reads: list[Read], phase: str, name: str) -> str:
    asked = [read for read in reads if (read.phase, read.name) == (phase, name)]
    return ", ".join(f"{read.language}:{read.by}" for read in asked)


def results(versions: dict[str, str], reads: dict[str, list[Read]]) -> str:
    """Return the text of the results file."""
    lines = [f"# {COMMAND}", f"# {_versions(versions)}"]
    for package, its_reads in reads.items():
        lines += ["", f"# a fresh process that imports and uses {package}"]
        lines += [f"{'# imported':<14} {'variable':<62} {'read by':<52} read again in use by"]
        lines += table(its_reads)
        copies = sorted({f"{read.by} ({read.phase})" for read in its_reads if read.name == COPY})
        lines += [f"# read the whole environment: {', '.join(copies) or 'none'}"]
        first = sorted({read.name for read in its_reads if read.phase == USE} - _at_import(its_reads))
        lines += [f"# read in use only: {', '.join(first) or 'none'}"]
    return "\n".join(lines) + "\n"


def _at_import(reads: list[Read]) -> set[str]:
    return {read.name for read in reads if read.phase != USE and read.name != COPY}


def _versions(versions: dict[str, str]) -> str:
    packages = ", ".join(f"{package} {version}" for package, version in sorted(versions.items()))
    return f"Python {platform.python_version()}, {packages}, {platform.system()} {platform.machine()}"


def module(versions: dict[str, str], reads: dict[str, list[Read]]) -> str:
    """Return the text of the generated module."""
    entries = []
    for phase in PHASES:
        names = {r.name for its in reads.values() for r in its if r.phase == phase and r.name != COPY}
        names |= READ_BY_EARLIER_TORCH.get(phase, set())
        wrapped = textwrap.fill(
            " ".join(sorted(names)), 106, initial_indent=" " * 8, subsequent_indent=" " * 8
        )
        entries.append(f'    "{phase}": _names(\n        """\n{wrapped}\n        """\n    ),')
    text = TEMPLATE.replace("@COMMAND@", COMMAND).replace("@VERSIONS@", _versions(versions))
    return text.replace("@ENTRIES@", "\n".join(entries))


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true", help=f"write {MODULE.name} and {RESULTS.name}")
    parser.add_argument("--json", action="store_true", help="print the reads as JSON")
    parser.add_argument("--only", choices=PACKAGES, help="measure this package alone")
    parser.add_argument("--no-c", action="store_true", help="measure Python code only: needs no C compiler")
    parser.add_argument("--record", choices=PACKAGES, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.record:
        print(json.dumps(record(asked.record)), flush=True)
        os._exit(0)  # not through the end of gloo's threads, see _use_torch
    if asked.write and (asked.only or asked.no_c):
        parser.error("--write needs the whole measurement: leave out --only and --no-c")
    if not asked.no_c and shutil.which("cc") is None:
        parser.error("there is no C compiler `cc`; --no-c measures the reads by Python code alone")
    measured = {name: measure(name, not asked.no_c) for name in ([asked.only] if asked.only else PACKAGES)}
    versions = {package: version for package, (version, _) in measured.items()}
    reads = {package: its_reads for package, (_, its_reads) in measured.items()}
    if asked.json:
        print(json.dumps([asdict(read) for its_reads in reads.values() for read in its_reads]))
    else:
        print(results(versions, reads), end="")
    if asked.write:
        MODULE.write_text(module(versions, reads))
        RESULTS.write_text(results(versions, reads))
    return 0


if __name__ == "__main__":
    sys.exit(main())
