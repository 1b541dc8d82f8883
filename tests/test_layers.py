"""Holds the one-way layers: reads every file of src/paceline and reports all violations at once."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "src" / "paceline"

# From the ground up. A file imports from its own unit and from the rows under it, never from a
# neighbour in its row (the words of the lowest row are one unit, so these may use each other).
ROWS: list[tuple[str, ...]] = [
    (
        "errors",
        "exit_codes",
        "units",
        "phrases",
        "finding",
        "reading",
        "own_code",
        "named",
        "codes",
        "seeds",
        "signatures",
    ),
    ("recipe",),
    ("pipeline", "lint", "schedulers"),
    ("plan",),
    ("generators",),
    ("torch_seams",),
    ("models", "data"),
    ("place",),
    ("devices",),
    ("world",),
    ("mesh",),
    ("comm", "memory", "sinks"),
    ("parallel", "checkpoint"),
    ("huggingface",),
    ("train", "launching"),
    ("verifying", "profiling", "doctor", "watch"),
    ("bench",),
    ("cli",),
]
# Rooms inside of a unit, from the ground up, with the same rule: folders, or files that all of them may use.
# Other files beside the rooms may use all of them.
ROOMS: dict[str, list[tuple[str, ...]]] = {
    "checkpoint": [("content",), ("writing",)],
    "launching": [
        *(("watcher",), ("ending",), ("rank",), ("warm",), ("processes",), ("members",), ("elastic",)),
    ],
    "parallel": [
        ("construct", "dropout"),
        ("sums", "tensor"),
        ("context", "experts", "replicate", "shard"),
        ("stages",),
        ("order",),
    ],
    "train": [
        *(("pieces", "belongings"), ("optimizer_state", "copies"), ("runners",), ("update",), ("step",)),
        *(("metrics",), ("state",), ("trainer",), ("run",)),
    ],
    "watch": [("protocol",), ("rank", "reasoning"), ("launcher",)],
}
# What a unit may use of a lower one, where that is less than all: the mechanisms know the words of a layout,
# but not the sections of a recipe.
PARTS: dict[tuple[str, str], set[str]] = {
    ("mesh", "recipe"): {"axes", "layout"},
    ("parallel", "recipe"): {"axes", "layout"},
    ("checkpoint", "recipe"): set(),
}
ROW = {unit: number for number, row in enumerate(ROWS) for unit in row}
WORDS = set(ROWS[0])
# They answer at once, and on a machine without torch.
TORCH_FREE = WORDS | {"recipe", "place", "plan", "pipeline", "lint", "schedulers"}
# The package's front door re-exports what the units give; only cli stands above it.
DOORS = {"__init__", "__main__"}
VAGUE_NAMES = {"utils", "util", "common", "helpers", "helper", "core", "misc"}
GROUP_MAKERS = {
    "DeviceMesh",
    "init_device_mesh",
    "init_process_group",
    "new_group",
    "new_subgroups",
    "new_subgroups_by_enumeration",
    "split_group",
}
MAKES_GROUPS = {"world", "mesh"}


@dataclass
class Source:
    """One file: its path below the package, its module name and what it imports."""

    path: str
    tree: ast.Module
    imports: list[tuple[int, str, bool]] = field(default_factory=list)
    """Line, full module name, and whether the import runs when the module is loaded."""

    @property
    def parts(self) -> tuple[str, ...]:
        return tuple(self.path.removesuffix(".py").split("/"))

    @property
    def unit(self) -> str:
        return self.parts[0]

    @property
    def module(self) -> str:
        parts = self.parts[:-1] if self.parts[-1] == "__init__" else self.parts
        return ".".join(("paceline", *parts))

    @property
    def package(self) -> str:
        return self.module if self.parts[-1] == "__init__" else self.module.rpartition(".")[0]


def check_sources(texts: dict[str, str]) -> list[str]:
    """Return all violations in files given as path below the package and text, each as `path:line: what`."""
    sources = [Source(path, ast.parse(text, path)) for path, text in sorted(texts.items())]
    modules = {source.module for source in sources}
    for source in sources:
        source.imports = list(_list_imports(source, modules))
    found: list[str] = []
    for source in sources:
        found += _check_names(source)
        found += _check_imports(source)
        found += _check_calls(source)
    return found + list(_check_cycles(sources))


def _list_imports(source: Source, modules: set[str]) -> Iterator[tuple[int, str, bool]]:
    """Yield every import of a file: also in functions, under TYPE_CHECKING, and by `import_module("...")`."""
    for node, at_load in _walk(source.tree, at_load=True):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name, at_load
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = source.package.split(".")
                above = above[: len(above) - node.level + 1]
                base = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                # `from package import name` is the module package.name where there is one.
                name = f"{base}.{alias.name}"
                yield node.lineno, name if name in modules else base, at_load
        elif isinstance(node, ast.Call) and _called(node) in ("import_module", "__import__") and node.args:
            first = node.args[0]
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                yield node.lineno, first.value, False


def _walk(node: ast.AST, *, at_load: bool) -> Iterator[tuple[ast.AST, bool]]:
    for child in ast.iter_child_nodes(node):
        inside = at_load and not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        yield child, inside
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
            for part in child.body:
                yield part, False
                yield from _walk(part, at_load=False)
            for part in child.orelse:
                yield part, inside
                yield from _walk(part, at_load=inside)
        else:
            yield from _walk(child, at_load=inside)


def _called(call: ast.Call) -> str:
    """The last name of what is called: `dist.new_group(...)` gives `new_group`."""
    if isinstance(call.func, ast.Attribute):
        return call.func.attr
    return call.func.id if isinstance(call.func, ast.Name) else ""


def _check_names(source: Source) -> Iterator[str]:
    for name in source.parts:
        if name in VAGUE_NAMES:
            yield f"{source.path}:1: a module named {name} collects what belongs elsewhere; name what it does"
    if source.unit not in ROW and source.unit not in DOORS:
        yield f"{source.path}:1: {source.unit} has no row in the layers; give it one in {Path(__file__).name}"


def _check_imports(source: Source) -> Iterator[str]:
    for line, name, _ in source.imports:
        top, _, rest = name.partition(".")
        at = f"{source.path}:{line}"
        if source.unit in TORCH_FREE and (top == "torch" or name == "safetensors.torch"):
            yield f"{at}: {source.unit} imports {name}, and it must work without torch"
        if source.unit in WORDS and top != "paceline" and top not in sys.stdlib_module_names:
            yield f"{at}: {source.unit} imports {name}; the words use the standard library only"
        if top == "paceline":
            yield from _check_row(source, at, rest.split(".")[0])
            yield from _check_part(source, at, rest.split("."))
            yield from _check_room(source, at, rest.split("."))


def _check_row(source: Source, at: str, unit: str) -> Iterator[str]:
    own = source.unit
    if own == unit or {own, unit} <= WORDS:
        return
    if unit in DOORS or not unit:
        if own not in {"cli", *DOORS}:
            yield f"{at}: {own} imports from the package's front door, which stands above it"
    elif own in DOORS:
        if unit == "cli" and own != "__main__":
            yield f"{at}: the front door imports cli, which stands above it"
    elif own in ROW and unit in ROW:
        if ROW[own] == ROW[unit]:
            yield f"{at}: {own} imports {unit}; neighbours in one layer don't know each other"
        elif ROW[own] < ROW[unit]:
            yield f"{at}: {own} imports {unit}, which stands above it"


def _check_part(source: Source, at: str, name: list[str]) -> Iterator[str]:
    allowed = PARTS.get((source.unit, name[0]))
    part = name[1] if len(name) > 1 else "__init__"
    if allowed is not None and part not in allowed:
        yield f"{at}: {source.unit} imports {'.'.join(name)}; of {name[0]} it may know {sorted(allowed)}"


def _check_room(source: Source, at: str, name: list[str]) -> Iterator[str]:
    rooms = {room: number for number, row in enumerate(ROOMS.get(source.unit, ())) for room in row}
    if name[0] != source.unit or len(name) < 2 or len(source.parts) < 2:
        return
    own, other = source.parts[1], name[1]
    if own != other and own in rooms and other in rooms and rooms[own] <= rooms[other]:
        yield f"{at}: {source.unit}/{own} imports {source.unit}/{other}, which is not below it"


def check_class_names(texts: dict[str, str]) -> list[str]:
    """Classes of one name at the top of two files: a name that a reader finds is then the right one."""
    homes: dict[str, list[str]] = {}
    for path, text in sorted(texts.items()):
        for node in ast.parse(text, path).body:
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, []).append(f"{path}:{node.lineno}")
    return [f"{name} is a class in {' and '.join(at)}" for name, at in homes.items() if len(at) > 1]


def _check_calls(source: Source) -> Iterator[str]:
    renamed = {
        alias.asname: alias.name
        for node in ast.walk(source.tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname
    }
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.Call):
            continue
        at = f"{source.path}:{node.lineno}"
        name = _called(node)
        name = renamed.get(name, name) if isinstance(node.func, ast.Name) else name
        stream = node.func.value if isinstance(node.func, ast.Attribute) else None
        # stderr is left out: a rank's own traceback goes there, as Python's would.
        writes = (
            name in ("write", "writelines") and isinstance(stream, ast.Attribute) and stream.attr == "stdout"
        )
        prints = writes or (isinstance(node.func, ast.Name) and name == "print")
        if prints and source.unit not in ("cli", "__main__"):
            yield f"{at}: prints; only cli does, others return, raise or log"
        if name in GROUP_MAKERS and source.unit not in MAKES_GROUPS:
            yield f"{at}: calls {name}; only world.py and mesh.py make process groups"


def _check_cycles(sources: list[Source]) -> Iterator[str]:
    """Modules that need each other to be loaded, reported once per cycle."""
    lines = {
        (source.module, name): (source.path, line)
        for source in sources
        for line, name, at_load in source.imports
        if at_load and name != source.module
    }
    modules = {source.module for source in sources}
    after: dict[str, list[str]] = {module: [] for module in sorted(modules)}
    for module, name in lines:
        if name in modules:
            after[module].append(name)
    done: set[str] = set()
    trail: list[str] = []

    def visit(module: str) -> Iterator[str]:
        trail.append(module)
        for name in after[module]:
            if name in trail:
                path, line = lines[module, name]
                yield f"{path}:{line}: import cycle {' > '.join([*trail[trail.index(name) :], name])}"
            elif name not in done:
                yield from visit(name)
        done.add(trail.pop())

    for module in after:
        if module not in done:
            yield from visit(module)


def _read_package() -> dict[str, str]:
    return {p.relative_to(PACKAGE).as_posix(): p.read_text(encoding="utf-8") for p in PACKAGE.rglob("*.py")}


def test_layers_hold() -> None:
    texts = _read_package()
    assert len(texts) > 10, f"{PACKAGE} was not found"
    found = check_sources(texts)
    assert not found, "\n" + "\n".join(f"src/paceline/{line}" for line in found)


def test_a_class_name_is_used_once() -> None:
    found = check_class_names(_read_package())
    assert not found, "\n".join(found)
    twice = {
        "train/a.py": "class Plan: ...",
        "data/b.py": "x = 1\nclass Plan: ...",
        "cli/c.py": "class Job: ...",
    }
    assert check_class_names(twice) == ["Plan is a class in data/b.py:2 and train/a.py:1"]


ALLOWED = {
    "a lower layer": {"train/trainer.py": "from paceline.data.loader import Share"},
    "the own unit": {"train/trainer.py": "from .update import Update", "train/update.py": ""},
    "a word uses a word": {"finding.py": "from paceline.errors import PacelineError"},
    "launch uses world": {"launching/local.py": "import paceline.world"},
    "the words of a layout": {"parallel/order.py": "from paceline.recipe.layout import Layout"},
    "cli uses the front door": {"cli/main.py": "import paceline\nprint(paceline)"},
    "the front door uses units": {"__init__.py": "from paceline.train.trainer import Trainer"},
    "__main__ uses cli": {"__main__.py": "from paceline.cli.main import main"},
    "world makes a group": {"world.py": "import torch.distributed as dist\ndist.init_process_group()"},
    "recipe uses pydantic": {"recipe/schema.py": "import pydantic"},
    "a mention is no import": {"plan/model_state.py": '"""import torch; print()"""'},
    "a file's own write": {"train/metrics.py": "def f(file): file.write('x')"},
    "types both ways": {
        "train/phases.py": "from paceline.train.probe import Probe",
        "train/probe.py": "if TYPE_CHECKING:\n    from paceline.train.phases import Phases",
    },
}


@pytest.mark.parametrize("texts", ALLOWED.values(), ids=ALLOWED.keys())
def test_checker_accepts(texts: dict[str, str]) -> None:
    assert check_sources(texts) == []


REFUSED = {
    "a higher layer": (
        {"data/order.py": "import os\nimport paceline.train"},
        "data/order.py:2: data imports train",
    ),
    "from the package": (
        {"data/order.py": "from paceline import world", "world.py": ""},
        "data/order.py:1: data imports world",
    ),
    "in a function": (
        {"models/gpt.py": "def f():\n    from paceline.mesh import g"},
        "models/gpt.py:2: models imports mesh",
    ),
    "for types only": (
        {"mesh.py": "if TYPE_CHECKING:\n    from paceline.parallel.order import f"},
        "mesh.py:2: mesh imports parallel",
    ),
    "for types, negated": (
        {"mesh.py": "if TYPE_CHECKING:\n    pass\nelse:\n    import paceline.train"},
        "mesh.py:4: mesh imports train",
    ),
    "relative": ({"data/order.py": "from ..train import trainer"}, "data/order.py:1: data imports train"),
    "relative, in a package": (
        {"data/__init__.py": "from ..cli.main import f"},
        "data/__init__.py:1: data imports cli",
    ),
    "by name": (
        {"recipe/load.py": "importlib.import_module('paceline.models.gpt')"},
        "recipe/load.py:1: recipe imports models",
    ),
    "a room above": (
        {"watch/reasoning/hang.py": "from paceline.watch.launcher.clock import Clock"},
        "watch/reasoning/hang.py:1: watch/reasoning imports watch/launcher, which is not below it",
    ),
    "a file under the rooms": (
        {"launching/watcher.py": "from paceline.launching.processes.ranks import Ranks"},
        "launching/watcher.py:1: launching/watcher imports launching/processes, which is not below it",
    ),
    "a room beside": (
        {"watch/rank/recorder.py": "import paceline.watch.reasoning.hang"},
        "watch/rank/recorder.py:1: watch/rank imports watch/reasoning, which is not below it",
    ),
    "a recipe's section": (
        {"parallel/shard/setup.py": "from paceline.recipe.schema import ShardSection"},
        "parallel/shard/setup.py:1: parallel imports recipe.schema; of recipe it may know ['axes', 'layout']",
    ),
    "neighbours": (
        {"launching/local.py": "import paceline.train.run"},
        "launching/local.py:1: launching imports train",
    ),
    "parallel and checkpoint": (
        {"checkpoint/writers.py": "from paceline.parallel.placement import Placement"},
        "checkpoint/writers.py:1: checkpoint imports parallel",
    ),
    "watchers": (
        {"doctor/machine.py": "import paceline.profiling"},
        "doctor/machine.py:1: doctor imports profiling",
    ),
    "world above mesh": (
        {"world.py": "from paceline.mesh import f"},
        "world.py:1: world imports mesh, which stands above",
    ),
    "the front door": (
        {"train/run.py": "from paceline import Trainer"},
        "train/run.py:1: train imports from the package's",
    ),
    "door to cli": (
        {"__init__.py": "from paceline.cli.main import main"},
        "__init__.py:1: the front door imports cli",
    ),
    "torch in a plan": (
        {"plan/model_state.py": "def f():\n    import torch.nn"},
        "plan/model_state.py:2: plan imports torch.nn",
    ),
    "torch by safetensors": (
        {"lint/rules.py": "from safetensors.torch import load"},
        "lint/rules.py:1: lint imports",
    ),
    "a word's dependency": ({"units.py": "import numpy"}, "units.py:1: units imports numpy"),
    "a vague file": ({"train/utils.py": ""}, "train/utils.py:1: a module named utils"),
    "a vague folder": ({"train/helpers/x.py": ""}, "train/helpers/x.py:1: a module named helpers"),
    "no row": ({"magic/x.py": ""}, "magic/x.py:1: magic has no row"),
    "a print": ({"train/run.py": "def f():\n    print(1)"}, "train/run.py:2: prints"),
    "a write": ({"train/run.py": "import sys\nsys.stdout.write('x')"}, "train/run.py:2: prints"),
    "a group": (
        {"comm/tree.py": "import torch.distributed as d\nd.new_group([0])"},
        "comm/tree.py:2: calls new_group",
    ),
    "a group, renamed": (
        {"train/run.py": "from torch.distributed import init_process_group as go\ngo()"},
        "train/run.py:2: calls init_process_group",
    ),
    "a mesh": ({"parallel/order.py": "DeviceMesh('cpu', [0])"}, "parallel/order.py:1: calls DeviceMesh"),
    "a cycle": (
        {"train/a.py": "import paceline.train.b", "train/b.py": "from paceline.train import a"},
        "train/b.py:1: import cycle paceline.train.a > paceline.train.b > paceline.train.a",
    ),
}


@pytest.mark.parametrize(("texts", "expected"), REFUSED.values(), ids=REFUSED.keys())
def test_checker_refuses(texts: dict[str, str], expected: str) -> None:
    found = check_sources(texts)
    assert len(found) == 1, found
    assert found[0].startswith(expected)


def test_checker_reports_everything_at_once() -> None:
    texts = {
        "data/core.py": "import paceline.train\nprint(1)",
        "world.py": "from paceline.cli import main",
    }
    assert [line.split(": ")[0] for line in check_sources(texts)] == [
        "data/core.py:1",
        "data/core.py:1",
        "data/core.py:2",
        "world.py:1",
    ]
