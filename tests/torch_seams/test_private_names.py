"""Private names of torch stand in src/paceline/torch_seams alone. The exceptions may only become fewer.

It finds imports of private modules and names of torch, dotted names such as `torch._C._nn`, attributes of any
object but `self` that the table of names has, and strings that are such a name.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from paceline.torch_seams.table import NAMES

PACKAGE = Path(__file__).parent.parent.parent / "src" / "paceline"
SEAMS = "torch_seams"
# How many are left in a file. Lower a number when you move one, and take the line out at 0.
LEFT: dict[str, int] = {}
# Our own attributes that share a name with one of torch's.
OURS = {
    "_state",
    "_settings",
    "_backend",
    "_base",
    "_scale",
}
# Names that are put together where they are used.
BUILT = ("torch._C._functions.", "torch._C._VariableFunctions.")


def find_private_names(text: str) -> Iterator[tuple[int, str]]:
    """Return line and text of each private name of torch in a file."""
    tree = ast.parse(text)
    modules = {
        alias.asname or alias.name.partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
        if alias.name.partition(".")[0] == "torch"
    } | {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and _is_torch(node.module)
        for alias in node.names
    }
    inner: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if _is_torch(alias.name) and _is_private(alias.name):
                    yield node.lineno, f"import {alias.name}"
        elif isinstance(node, ast.ImportFrom) and node.module is not None and _is_torch(node.module):
            for alias in node.names:
                if _is_private(f"{node.module}.{alias.name}"):
                    yield node.lineno, f"from {node.module} import {alias.name}"
        elif isinstance(node, ast.Attribute) and id(node) not in inner:
            # The longest chain counts once: of torch._C._nn the inner torch._C does not.
            part = node.value
            while isinstance(part, ast.Attribute):
                inner.add(id(part))
                part = part.value
            if _is_private_attribute(node, modules):
                yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.Constant) and node.value in KNOWN:
            yield node.lineno, repr(node.value)


def _is_torch(module: str | None) -> bool:
    return module is not None and module.partition(".")[0] == "torch"


def _is_private(dotted: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in dotted.split("."))


def _is_private_attribute(node: ast.Attribute, modules: set[str]) -> bool:
    chain = [node]
    while isinstance(chain[-1].value, ast.Attribute):
        chain.append(chain[-1].value)
    root = chain[-1].value
    if isinstance(root, ast.Name) and root.id in modules:
        return _is_private(".".join(part.attr for part in chain))
    # In our own classes, `self._parameters` is not torch's.
    own = chain[-1] if isinstance(root, ast.Name) and root.id in ("self", "cls") else None
    return any(part.attr in KNOWN for part in chain if part is not own)


KNOWN = {
    part
    for names in NAMES.values()
    for name in names
    for path in name.paths
    for part in path.split(".")
    if _is_private(part)
} - OURS


def test_private_names_of_torch_stand_in_one_place() -> None:
    found: dict[str, list[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        if not name.startswith(f"{SEAMS}/"):
            for line, text in find_private_names(path.read_text(encoding="utf-8")):
                found.setdefault(name, []).append(f"src/paceline/{name}:{line}: {text}")
    more = [line for name, lines in found.items() if len(lines) > LEFT.get(name, 0) for line in lines]
    assert not more, f"use or write a function of src/paceline/{SEAMS}:\n" + "\n".join(more)
    counts = Counter({name: len(lines) for name, lines in found.items()})
    fewer = [f"{name}: {counts[name]}, not {left}" for name, left in LEFT.items() if counts[name] < left]
    assert not fewer, "lower these numbers in LEFT:\n" + "\n".join(fewer)


def test_each_name_of_the_table_is_used() -> None:
    used = "\n".join(
        path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py") if path.name != "names.py"
    )
    unused = [
        f"{topic}: {path}"
        for topic, names in NAMES.items()
        for name in names
        for path in name.paths
        if path.rpartition(".")[2] not in used and not path.startswith(BUILT)
    ]
    assert not unused, "\n".join(unused)
    assert not [topic for topic in NAMES if not (PACKAGE / SEAMS / f"{topic}.py").exists()]


def test_what_counts_as_private() -> None:
    text = """
import torch, torch._dynamo
import torch.utils.data._utils.worker as worker
from torch.nn.modules.batchnorm import _BatchNorm, BatchNorm2d
from torch._C import Generator
from torch import nn
from elsewhere import _parameters
torch._C._nn.gelu(1)
nn.init._no_grad_trunc_normal_
worker._worker_info
model._parameters["weight"]
self.model._buffers.items()
self._parameters
setattr(model, "_buffers", {})
torch.nn.functional.gelu
torch.__version__
model._own
"torch._C"
"""
    assert [found for _, found in sorted(find_private_names(text))] == [
        "import torch._dynamo",
        "import torch.utils.data._utils.worker",
        "from torch.nn.modules.batchnorm import _BatchNorm",
        "from torch._C import Generator",
        "torch._C._nn.gelu",
        "nn.init._no_grad_trunc_normal_",
        "worker._worker_info",
        "model._parameters",
        "self.model._buffers.items",
        "'_buffers'",
    ]
