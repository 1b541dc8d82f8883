"""Environment variables that numpy and torch read while they are imported.

In a process that imported them, a script that sets such a variable is too late: the old value counts. Other
variables are read when they are used, if at all, so setting them after the import is early enough. The list
is measured: `import_environment.txt`, by `tools/measure_import_environment.py`.
"""

from __future__ import annotations

from pathlib import Path

_LIST = Path(__file__).with_suffix(".txt")


def _read_list() -> dict[str, frozenset[str]]:
    _, *parts = _LIST.read_text(encoding="utf-8").split("\n[")
    return {phase: frozenset(names.split()) for phase, _, names in (part.partition("]") for part in parts)}


# By the import that reads them, Python and C code together. torch imports numpy, so "torch" has the names
# of "numpy" too. torch.optim imports torch._dynamo with the first optimizer.
READ_AT_IMPORT: dict[str, frozenset[str]] = _read_list()

# Not measured: by hand, from the sources of torch. In a CUDA build a static initializer of the caching
# allocator reads the backend (native or cudaMallocAsync) from these when the library is loaded. The other
# options in them are read at the first use of the allocator, but a value can hold both.
READ_AT_LOAD_WITH_CUDA: frozenset[str] = frozenset(
    {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"}
)

# tqdm, which torch.hub imports where it is installed, goes through the whole environment for its defaults.
PREFIXES_READ_AT_IMPORT: tuple[str, ...] = ("TQDM_",)
