"""Reads a script before it runs: which parts of torch it will import, and what rules out a warm start."""

from __future__ import annotations

import os
import re
import sys
from contextlib import suppress
from pathlib import Path

from paceline.launching.rank.script import Script, list_sources
from paceline.launching.warm.import_environment import PREFIXES_READ_AT_IMPORT, READ_AT_IMPORT
from paceline.launching.warm.warm import REAPPLIED

# The first optimizer imports torch._dynamo, and so does the first module under DDP or FSDP.
_USES_DYNAMO = re.compile(r"\boptim\b|\bcompile\b|DistributedDataParallel|fully_shard|accelerat|lightning")
_DYNAMO = "torch._dynamo"
# Packages that torch._dynamo imports.
_OF_TORCH = {"numpy", "sympy", "mpmath", "tqdm", "typing_extensions", "torchgen", "jinja2", "networkx"}
# Ways to change a variable; the last part of each has its name.
_CHANGES = re.compile(
    r"environ\[([^\]]*)\]\s*=[^=]|del\s[^\n]*environ\[([^\]]*)\]"
    r"|(?:environ\.(?:setdefault|update|pop)|putenv|unsetenv)\(([^)]*[^\n]*)"
)


def _read_text(script: Script) -> str:
    """Return the script's text; empty if there is none, which running it will report."""
    with suppress(OSError, ValueError, StopIteration):
        return next(list_sources(script)).read_text(encoding="utf-8")
    return ""


def _list_changed(text: str) -> set[str]:
    """Return the names of variables that a script changes, as far as its text shows them."""
    return {word for found in _CHANGES.findall(text) for part in found for word in re.findall(r"\w+", part)}


def choose_modules(script: Script) -> list[str]:
    """Return the parts of torch to import ahead, each of which costs a second: those that its text needs."""
    text = _read_text(script)
    needs = _USES_DYNAMO.search(text) and not _list_changed(text) & READ_AT_IMPORT[_DYNAMO]
    return ["torch", "torch.distributed", *[_DYNAMO] * bool(needs)]


def find_settings(script: Script) -> list[str]:
    """Return variables that the script changes, and that torch or numpy read at import.

    Those that its text does not show are noticed when it imports torch (`warm.py`).
    """
    matters = (READ_AT_IMPORT["numpy"] | READ_AT_IMPORT["torch"]) - set(REAPPLIED)
    changed = _list_changed(_read_text(script))
    return sorted(n for n in changed if n in matters or n.startswith(PREFIXES_READ_AT_IMPORT))


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
