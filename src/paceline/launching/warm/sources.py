"""Reads a script before it runs: which parts of torch it will import, and what rules out a warm start."""

from __future__ import annotations

import ast
import os
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from paceline.launching.rank.script import Script, list_sources
from paceline.launching.warm.import_environment import PREFIXES_READ_AT_IMPORT, READ_AT_IMPORT
from paceline.launching.warm.warm import REAPPLIED

# Every script needs these. Other packages are chosen by the script's text, because each costs a second.
_ALWAYS = ("torch", "torch.distributed")
# The first optimizer imports torch._dynamo, and so does the first module under DDP or FSDP.
_USES_DYNAMO = re.compile(r"\boptim\b|\bcompile\b|DistributedDataParallel|fully_shard|accelerat|lightning")
_DYNAMO = "torch._dynamo"
_NEED_DYNAMO = (_DYNAMO, "torch._inductor", "torch.distributed.fsdp", "torch.distributed._composable")
# Packages that torch._dynamo imports.
_OF_TORCH = {"numpy", "sympy", "mpmath", "tqdm", "typing_extensions", "torchgen", "jinja2", "networkx"}
_MOST_SOURCES = 200


def choose_modules(script: Script) -> list[str]:
    """Return the parts of torch that the script's text and the modules beside it name."""
    names = set(_ALWAYS)
    uses_dynamo = sets_dynamo = False
    for text, tree in _read_sources(script):
        for node in ast.walk(tree):
            names.update(name for name in _imported(node) if name.startswith("torch."))
        uses_dynamo |= bool(_USES_DYNAMO.search(text))
        sets_dynamo |= any(name in READ_AT_IMPORT[_DYNAMO] for name, _ in _assigned(tree))
    if uses_dynamo and not sets_dynamo:
        names.add(_DYNAMO)
    elif sets_dynamo:
        names = {name for name in names if not name.startswith(_NEED_DYNAMO)}
    # Sorted by name, a package comes before its modules.
    return sorted(names)


def _read_sources(script: Script) -> Iterator[tuple[str, ast.Module]]:
    """Read the script and, from there, the modules beside it that it imports."""
    waiting = list(list_sources(script))
    # A package may name its own modules in full.
    root = _folder_of(script)
    seen: set[Path] = set()
    while waiting and len(seen) < _MOST_SOURCES:
        path = waiting.pop()
        if path in seen:
            continue
        seen.add(path)
        try:
            text = path.read_text(encoding="utf-8")
            tree = ast.parse(text)
        except (OSError, ValueError, SyntaxError):  # running it will report the error
            continue
        yield text, tree
        for node in ast.walk(tree):
            for name in _imported(node):
                for folder in {path.parent, root}:
                    beside = folder.joinpath(*name.split("."))
                    waiting += [p for p in (beside.with_suffix(".py"), beside / "__init__.py") if p.is_file()]


def _imported(node: ast.AST) -> Iterator[str]:
    """Return names that may be modules: of `from a.b import c` both a.b and a.b.c."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if base:
            yield base
        yield from (f"{base}.{alias.name}".lstrip(".") for alias in node.names if alias.name != "*")


def find_settings(script: Script) -> list[str]:
    """Return variables that the script sets to a new value, and that torch or numpy read at import."""
    path = next(list_sources(script), None)
    if path is None:
        return []
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError):
        return []
    matters = (READ_AT_IMPORT["numpy"] | READ_AT_IMPORT["torch"]) - set(REAPPLIED)
    return sorted(
        {
            name
            for name, value in _assigned(tree)
            if (name in matters or name.startswith(PREFIXES_READ_AT_IMPORT))
            and (value is None or value != os.environ.get(name))
        }
    )


def _assigned(tree: ast.Module) -> Iterator[tuple[str, str | None]]:
    """Yield the names of variables that are set, and their values if these are known.

    In `os.environ["X"] = ...`, in its `setdefault`, `update` and `pop`, in `os.putenv`.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Subscript) and "environ" in ast.unparse(target.value):
                    yield from _pair(target.slice, node.value)
        elif isinstance(node, ast.Delete):
            for target in node.targets:
                if isinstance(target, ast.Subscript) and "environ" in ast.unparse(target.value):
                    yield from _pair(target.slice, None)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            yield from _assigned_by(node, ast.unparse(node.func))


def _assigned_by(call: ast.Call, name: str) -> Iterator[tuple[str, str | None]]:
    first = call.args[0] if call.args else None
    second = call.args[1] if len(call.args) > 1 else None
    if name in ("os.putenv", "os.unsetenv") and first is not None:
        yield from _pair(first, None)
    elif "environ" in name and name.endswith((".setdefault", ".pop", ".update")):
        for keyword in call.keywords:
            yield from _pair(ast.Constant(keyword.arg), keyword.value)
        if isinstance(first, ast.Dict):
            for key, value in zip(first.keys, first.values, strict=True):
                yield from _pair(key, value)
        elif first is not None and name.endswith(".setdefault"):
            # setdefault changes nothing if the variable is set.
            if isinstance(first, ast.Constant) and str(first.value) not in os.environ:
                yield from _pair(first, second)
        elif first is not None and not (
            # Removing a variable that is not set changes nothing.
            name.endswith(".pop") and isinstance(first, ast.Constant) and str(first.value) not in os.environ
        ):
            yield from _pair(first, None)


def _pair(name: ast.AST | None, value: ast.AST | None) -> Iterator[tuple[str, str | None]]:
    if isinstance(name, ast.Constant) and isinstance(name.value, str):
        yield (
            name.value,
            value.value if isinstance(value, ast.Constant) and isinstance(value.value, str) else None,
        )


def may_load_ahead(script: Script) -> bool:
    """Return whether no file beside the script has the name of a module that parts of torch would load."""
    own = _list_own(_folder_of(script))
    return not own & (set(sys.stdlib_module_names) | _OF_TORCH) - {"__main__"}


def find_shadowed(script: Script) -> list[str]:
    """Return modules that are loaded here, but that the script would find in its own folder."""
    folder = _folder_of(script)
    own = _list_own(folder)
    loaded = {name for name in sys.modules if "." not in name and name not in sys.builtin_module_names}
    found = []
    for name in sorted((loaded - {"__main__"}) & own):
        origin = getattr(getattr(sys.modules[name], "__spec__", None), "origin", None)
        if origin is not None and origin != "frozen" and not _is_within(origin, folder):
            found.append(name)
    return found


def _folder_of(script: Script) -> Path:
    """Return the first entry of the script's `sys.path`."""
    if script.is_module:
        return Path.cwd()
    target = Path(os.path.abspath(script.target))
    return target if target.is_dir() else Path(os.path.realpath(target)).parent


def _list_own(folder: Path) -> set[str]:
    """Return the names of modules and packages in a folder that a script finds first."""
    if sys.flags.safe_path:
        return set()
    try:
        entries = {entry.name for entry in os.scandir(folder)}
    except OSError:
        return set()
    own = {entry.removesuffix(".py") for entry in entries if entry.endswith(".py")}
    return own | {entry for entry in entries if (folder / entry / "__init__.py").is_file()}


def _is_within(path: str, folder: Path) -> bool:
    with suppress(ValueError):
        Path(path).relative_to(folder)
        return True
    return False
