"""Runs a script abstractly as one simulated rank.

What follows from the rank is computed. A branch on anything else is walked both ways, a loop is walked once.
Calls into the file and the modules beside it are followed.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, TypeVar

from paceline.lint import facts, library
from paceline.lint.evaluation import Evaluator
from paceline.lint.scopes import Changes, Class, Function, Module, ScriptFrame, is_worth_unrolling, join_all
from paceline.lint.trace import BranchItem, CallItem, ExitItem, Item, LoopItem, TraceEvent
from paceline.lint.values import (
    UNKNOWN,
    Taint,
    Value,
    WitnessPlace,
    constant,
    join,
    sequence,
    tainted,
    unknown,
)

_MOST_CALLS = 14
_MOST_UNROLLED = 16
_MOST_MODULES = 30
_MOST_BYTES = 1_000_000
NEXT = frozenset({"next"})
_Result = TypeVar("_Result")


@lru_cache(maxsize=10_000)
def list_files(root: str, name: str) -> tuple[str, ...]:
    """Return the files that a module of a folder may be in."""
    path = os.path.normpath(os.path.join(root, *name.split(".")))
    files = (path + ".py", os.path.join(path, "__init__.py"))[not name :]
    return tuple(file for file in files if os.path.isfile(file))


@lru_cache(maxsize=512)
def _parse_file(path: str) -> ast.Module | None:
    with suppress(OSError, SyntaxError, ValueError, RecursionError):
        if os.path.getsize(path) < _MOST_BYTES:
            return ast.parse(Path(path).read_text(encoding="utf-8"), path)
    return None


class Interpreter(Evaluator):
    """One witness.

    Args:
        place: where it runs.
        main: the script.
    """

    def __init__(self, place: WitnessPlace, main: Module) -> None:
        super().__init__(place)
        self.main = main
        self.is_quiet = False  # while a loop is walked to see what changes
        self.modules: dict[str, Module] = {}
        self.visited: set[int] = set()
        self.trail: list[tuple[dict[str, Any], str, Any]] = []
        self.trace: list[Item] = []
        self.out = self.trace
        self.loops: tuple[int, ...] = ()
        self.conditions: list[int] = []
        self.active: list[int] = []  # functions that are called
        self.environ = Value("environ")
        self.reads: set[str] = set()
        self.num_forks = 0

    # What changes, and can be undone.

    def set(self, table: dict[str, Any], key: str, value: Any) -> None:
        """Change an entry of a table of names or attributes."""
        self.trail.append((table, key, table.get(key, UNKNOWN)))
        table[key] = value

    def _undo(self, mark: int) -> Changes:
        """Undo all changes since a mark; return the last value of each."""
        last: Changes = {}
        while len(self.trail) > mark:
            table, key, old = self.trail.pop()
            if (id(table), key) not in last:
                last[id(table), key] = table, key, table.get(key, UNKNOWN)
            if old is UNKNOWN:
                table.pop(key, None)
            else:
                table[key] = old
        return last

    def _merge(self, sides: Sequence[Changes], by: int, *, stays: bool) -> None:
        """Join the changes of several arms with what was before, if a path without changes remains."""
        changes = {place: change for side in sides for place, change in side.items()}
        for place, (table, key, _) in changes.items():
            base = table.get(key, UNKNOWN)
            values = [side[place][2] if place in side else base for side in sides] + [base] * stays
            self.set(table, key, join_all(key, values, by))

    # Events.

    def emit(self, kind: str, node: ast.AST, **data: Any) -> TraceEvent:
        """Record an event."""
        data |= {"spawned": self.is_spawned, "started": self.is_started, "unread": self.num_unread_calls}
        data["limit"] = self._place.local_world
        event = TraceEvent(node, self.frame.module.path, kind, data, self.loops)
        self.out.append(event)
        return event

    def into(self, items: list[Item], do: Callable[[], _Result]) -> _Result:
        """Do something, and let what happens be recorded there."""
        before, self.out = self.out, items
        ends = do()
        self.out = before
        return ends

    # Modules.

    def run_module(self, module: Module, *, is_main: bool) -> None:
        """Run a file."""
        self.modules[module.path] = module
        module.names["__name__"] = constant("__main__" if is_main else Path(module.path).stem)
        module.names["__file__"] = constant(module.path)
        frame = ScriptFrame(module.names, module)
        before, self.frame = getattr(self, "frame", frame), frame
        self.execute(module.tree.body)
        self.frame = before

    def find_module(self, name: str, level: int) -> Module | None:
        """Return the module beside the script that an import means."""
        roots = [os.path.dirname(self.frame.module.path), os.path.dirname(self.main.path)]
        for root in roots[:1] if level else roots:
            for file in list_files(os.path.join(root, *[".."] * (level - 1)), name):
                if file in self.modules:
                    return self.modules[file]
                if len(self.modules) < _MOST_MODULES and (tree := _parse_file(file)) is not None:
                    module = Module(file, tree)
                    self.run_module(module, is_main=False)
                    return module
        return None

    # Statements.

    def execute(self, body: Iterable[ast.stmt]) -> frozenset[str]:
        """Run statements; return the ways in which they may end: next, return, break, continue, raise."""
        ends: frozenset[str] = frozenset()
        for statement in body:
            method = self.find_method("_run_", statement)
            found: frozenset[str] | None = method(statement) if method is not None else None
            if found is None:
                continue
            ends |= found - NEXT
            if "next" not in found:
                return ends
        return ends | NEXT

    def _run_expr(self, node: ast.Expr) -> frozenset[str] | None:
        value = self.eval(node.value)
        return frozenset({"raise"}) if value.kind == "never" else None

    def _run_assign(self, node: ast.Assign) -> None:
        value = self.eval(node.value)
        for target in node.targets:
            self.assign(target, value)

    def _run_annassign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.assign(node.target, self.eval(node.value))

    def _run_augassign(self, node: ast.AugAssign) -> None:
        before = self.eval(node.target)
        value = self.binary(before, node.op, self.eval(node.value), node)
        if before.kind == "tensor":  # in place: it stays the same object
            self.set(before.attrs, "#taint", value.taint)
            if value.fact("averaged"):
                self.set(before.attrs, "#averaged", True)
            if not value.deps <= before.deps:
                self.assign(node.target, value)
            self.wrote_gradient(node.target)
            return
        self.assign(node.target, value)

    def wrote_gradient(self, target: ast.AST) -> None:
        """Record that a gradient is written: it may be cleared, scaled or exchanged by hand."""
        part: Any = target
        while isinstance(part, (ast.Attribute, ast.Subscript)):
            if getattr(part, "attr", "") in ("grad", "main_grad"):
                self.emit("grad", target)
            part = part.value

    def assign(self, target: ast.AST, value: Value) -> None:
        """Bind a target to a value."""
        if isinstance(target, ast.Name):
            self.set(self._table_of(target.id), target.id, value)
        elif isinstance(target, ast.Attribute):
            self.wrote_gradient(target)
            owner = self.eval(target.value)
            library.set_attribute(self, owner, target.attr, value, target)
        elif isinstance(target, ast.Subscript):
            self.wrote_gradient(target)
            library.set_item(self, self.eval(target.value), self.eval(target.slice), value, target)
        elif isinstance(target, ast.Starred):
            self.assign(target.value, Value("list", taint=value.taint, deps=value.deps))
        elif isinstance(target, (ast.Tuple, ast.List)):
            items = value.items
            known = items is not None and len(items) == len(target.elts)
            for i, element in enumerate(target.elts):
                self.assign(element, items[i] if known and items is not None else self.element(value, i))

    def _table_of(self, name: str) -> dict[str, Any]:
        if name in self.frame.globals:
            return self.frame.module.names
        if name in self.frame.nonlocals:
            outer = self.frame.outer
            while outer is not None:
                if name in outer.names:
                    return outer.names
                outer = outer.outer
        return self.frame.names

    def _run_global(self, node: ast.Global) -> None:
        self.frame.globals.update(node.names)

    def _run_nonlocal(self, node: ast.Nonlocal) -> None:
        self.frame.nonlocals.update(node.names)

    def _run_import(self, node: ast.Import) -> None:
        for alias in node.names:
            self.has_torch |= alias.name.startswith(("torch", "numpy"))
            module = self.find_module(alias.name, 0)
            if module is not None and "." not in alias.name:
                value = Value("module", ref=module)
            else:
                value = Value("lib", ref=alias.name if alias.asname else alias.name.partition(".")[0])
            self.set(self.frame.names, alias.asname or alias.name.partition(".")[0], value)

    def _run_importfrom(self, node: ast.ImportFrom) -> None:
        module = self.find_module(node.module or "", node.level)
        self.has_torch |= (node.module or "").startswith(("torch", "numpy"))
        for alias in node.names:
            name = alias.asname or alias.name
            if module is not None:
                if alias.name == "*":
                    for key, value in list(module.names.items()):
                        if not key.startswith("_"):
                            self.set(self.frame.names, key, value)
                    continue
                found = module.names.get(alias.name)
                if found is None:
                    sub = self.find_module(
                        f"{node.module}.{alias.name}" if node.module else alias.name, node.level
                    )
                    found = Value("module", ref=sub) if sub is not None else unknown()
                self.set(self.frame.names, name, found)
            else:
                dotted = "." * node.level + (node.module or "")
                self.set(self.frame.names, name, Value("lib", ref=f"{dotted}.{alias.name}"))

    def _run_functiondef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        value = Value("func", ref=Function(node, self.frame, self.frame.module), node=node)
        for decorator in reversed(node.decorator_list):
            value = library.decorate(self, decorator, value)
        self.set(self._table_of(node.name), node.name, value)

    def _run_classdef(self, node: ast.ClassDef) -> None:
        bases = [self.eval(base) for base in node.bases]
        frame = ScriptFrame({}, self.frame.module, self.frame)
        frame.is_class = True
        before, self.frame = self.frame, frame
        self.execute(node.body)
        self.frame = before
        value = Value("class", ref=Class(node, frame.names, bases, self.frame.module), node=node)
        self.set(self._table_of(node.name), node.name, value)

    def _run_return(self, node: ast.Return) -> frozenset[str]:
        value = self.eval(node.value) if node.value is not None else constant(None)
        by = self.frame.taint
        for taint in self.conditions:
            by |= taint
        self.frame.returns.append(tainted(value, by))
        return self._leave("return", node)

    def _leave(self, kind: str, node: ast.AST) -> frozenset[str]:
        self.out.append(ExitItem(node, self.frame.module.path, kind))
        return frozenset({kind})

    def _run_break(self, node: ast.Break | ast.Continue | ast.Raise) -> frozenset[str]:
        return self._leave(type(node).__name__.lower(), node)

    _run_continue = _run_raise = _run_break

    def _run_assert(self, node: ast.Assert) -> None:
        self.eval(node.test)

    def _run_if(self, node: ast.If) -> frozenset[str]:
        condition = self.eval(node.test)
        truth = self.truth(condition)
        if truth is not None:
            self.conditions.append(condition.taint)
            ends = self.execute(node.body if truth else node.orelse)
            self.conditions.pop()
            return ends
        arms = [lambda: self.execute(node.body), lambda: self.execute(node.orelse)]
        return self.fork(node, condition, arms)

    def fork(
        self, node: ast.AST, condition: Value, arms: Sequence[Callable[[], frozenset[str]]]
    ) -> frozenset[str]:
        """Walk several arms from the same state, and join what they leave."""
        branch = BranchItem(node, self.frame.module.path, condition.taint, [], condition)
        by = condition.taint & (Taint.LOCAL | Taint.RANK)
        self.conditions.append(by)
        self.num_forks += 1
        before = self.initialized
        ends: frozenset[str] = frozenset()
        sides = []
        states = []
        for arm in arms:
            items: list[Item] = []
            mark = len(self.trail)
            self.initialized = before
            found = self.into(items, arm)
            changes = self._undo(mark)
            branch.arms.append(items)
            ends |= found
            if "next" in found:
                sides.append(changes)
                states.append(self.initialized)
            if found & {"return", "break", "continue"}:
                self.frame.pending.append(changes)
        self.conditions.pop()
        self.num_forks -= 1
        if ends - NEXT - {"raise"}:
            self.frame.taint |= by
        if states:
            self.initialized = states[0] if len(set(states)) == 1 else None
        self._merge(sides, by, stays=False)
        self.out.append(branch)
        return ends

    def _run_while(self, node: ast.While) -> frozenset[str]:
        condition = self.eval(node.test)
        if self.truth(condition) is False:
            return self.execute(node.orelse)
        endless = isinstance(node.test, ast.Constant) and bool(node.test.value)
        loop = LoopItem(node, self.frame.module.path, Taint.NONE, [])

        def body() -> frozenset[str]:
            condition = self.eval(node.test)
            loop.taint = condition.taint
            return self.execute(node.body)

        return self._loop(loop, body, node.orelse, endless=endless)

    def _run_for(self, node: ast.For | ast.AsyncFor) -> frozenset[str]:
        source = self.eval(node.iter)
        items = facts.known_items(source)
        if items is not None and len(items) <= _MOST_UNROLLED and is_worth_unrolling(node):
            ends: frozenset[str] = NEXT
            for item in items:
                self.assign(node.target, item)
                found = self.execute(node.body)
                ends |= found - {"break", "continue"}
                if "next" not in found and "continue" not in found:
                    return (ends - NEXT) | (NEXT if "break" in found else frozenset())
            return ends
        loop = LoopItem(node, self.frame.module.path, Taint.NONE, [])
        loop.count = len(items) if items is not None else facts.known_length(source)
        loop.is_uneven = bool(source.fact("uneven"))
        loop.is_joined = self.num_joins > 0

        def body() -> frozenset[str]:
            inside, self.loops = self.loops, self.loops[:-1]
            item = library.iterate(self, source, node.iter)
            self.loops = inside
            self.assign(node.target, item)
            return self.execute(node.body)

        return self._loop(loop, body, node.orelse, endless=False)

    def _loop(
        self, loop: LoopItem, body: Callable[[], frozenset[str]], otherwise: list[ast.stmt], *, endless: bool
    ) -> frozenset[str]:
        before = self.loops
        self.loops = (*before, id(loop.node))
        if not self.is_quiet:  # once for what changes from round to round
            self.is_quiet = True
            mark, saved = len(self.trail), (self.initialized, self.frame.taint)
            returns, pending = len(self.frame.returns), len(self.frame.pending)
            self.into([], body)
            self._forget([self._undo(mark), *self.frame.pending[pending:]])
            del self.frame.returns[returns:], self.frame.pending[pending:]
            self.initialized, self.frame.taint, self.is_quiet = *saved, False
        mark, pending = len(self.trail), len(self.frame.pending)
        found = self.into(loop.body, body)
        changes = self._undo(mark)
        sides = [changes] * bool(found & {"next", "continue", "break"}) + self.frame.pending[pending:]
        for table, key, value in changes.values():
            if table.get(key, UNKNOWN) is UNKNOWN:  # made in the loop: rounds are taken to happen
                self.set(table, key, value)
        self._merge(sides, Taint.NONE, stays=True)
        self.loops = before
        self.out.append(loop)
        ends = found - {"break", "continue", "next"}
        if endless and "break" not in found:
            return ends
        return ends | self.execute(otherwise)

    def _forget(self, sides: list[Changes]) -> None:
        for side in sides:
            for table, key, value in side.values():
                base = table.get(key, UNKNOWN)
                if base is UNKNOWN or base is value:
                    continue
                if isinstance(value, Value) and isinstance(base, Value):
                    if key.startswith("#") and not value.kind:
                        continue
                    joined = join(base, value)
                    if not joined.kind and joined.is_known and base.is_known:
                        joined = unknown(joined.taint)
                    self.set(table, key, joined)
                elif key == "#items":
                    self.set(table, key, None)
                elif key == "#taint":
                    self.set(table, key, value)

    def _run_with(self, node: ast.With | ast.AsyncWith) -> frozenset[str]:
        leave = []
        for item in node.items:
            value = self.eval(item.context_expr)
            leave.append(library.enter(self, value, item.context_expr))
            if item.optional_vars is not None:
                self.assign(item.optional_vars, value.attrs.get("#as", value))
        ends = self.execute(node.body)
        for undo in reversed(leave):
            undo()
        return ends

    def _run_try(self, node: ast.Try) -> frozenset[str]:
        items: list[Item] = []
        ends = self.into(items, lambda: self.execute([*node.body, *node.orelse]))
        guarded = BranchItem(node, self.frame.module.path, Taint.NONE, [items])
        self.out.append(guarded)
        handled: list[tuple[ast.ExceptHandler, list[Item], frozenset[str]]] = []
        for handler in node.handlers:
            mark, arm = len(self.trail), list[Item]()
            if handler.name:
                self.assign(ast.Name(handler.name), unknown(Taint.UNKNOWN | Taint.LOCAL))
            found = self.into(arm, partial(self.execute, handler.body))
            handled.append((handler, arm, found))
            changes = self._undo(mark)
            if "next" in found:
                self._merge([changes], Taint.NONE, stays=True)
                if "next" not in ends and not any(isinstance(item, ExitItem) for item in items):
                    ends |= NEXT
        last: list[Item] = []
        final = self.into(last, lambda: self.execute(node.finalbody)) - NEXT
        self.out += last
        is_manager = "#yields" in self.frame.names
        data = {"handlers": handled, "is_retried": bool(self.loops), "last": last, "is_manager": is_manager}
        self.emit("try", node, body=items, **data)
        return (ends - {"raise"} if handled else ends) | final

    def _run_match(self, node: ast.Match) -> frozenset[str]:
        subject = self.eval(node.subject)
        arms = [(lambda case=case: self.execute(case.body)) for case in node.cases]
        return self.fork(node, subject, [*arms, lambda: NEXT])

    # Calls of functions of the script.

    def call_function(
        self,
        value: Value,
        args: Sequence[Value],
        kwargs: dict[str, Value],
        node: ast.AST,
        owner: Value | None = None,
    ) -> Value:
        """Follow a call."""
        function: Function = value.ref
        definition: Any = function.node
        if len(self.active) > _MOST_CALLS or id(definition) in self.active:
            return unknown(deps=facts.deps_of(args))
        self.visited.add(id(definition))
        frame = ScriptFrame({}, function.module, function.frame)
        owner = owner if owner is not None else value.attrs.get("#self")
        self._bind(frame, definition.args, [owner, *args] if owner is not None else list(args), kwargs)
        before = self.frame, self.conditions
        self.frame, self.conditions = frame, []
        self.active.append(id(definition))
        items: list[Item] = []
        body = definition.body
        if isinstance(definition, ast.Lambda):
            body = [ast.copy_location(ast.Return(definition.body), definition.body)]
        ends = self.into(items, lambda: self.execute(body))
        self.frame, self.conditions = before
        self.active.pop()
        self._merge(frame.pending, frame.taint, stays=True)
        self.out.append(CallItem(node, self.frame.module.path, items))
        if ends == {"raise"}:
            return Value("never")
        if "#yields" in frame.names:
            facts_of = {"#element": frame.names["#yields"], "#even": "next" not in ends}
            return Value("list", taint=frame.names["#yields"].taint, attrs=facts_of)
        if "next" in ends:
            frame.returns.append(Value(const=None, taint=frame.taint))
        result = frame.returns[0] if frame.returns else constant(None)
        for other in frame.returns[1:]:
            result = join(result, other, frame.taint)
        return result

    def _bind(
        self, frame: ScriptFrame, args: ast.arguments, given: list[Value], kwargs: dict[str, Value]
    ) -> None:
        names = [arg.arg for arg in (*args.posonlyargs, *args.args)]
        known = [*names, *(arg.arg for arg in args.kwonlyargs)]
        defaults = [None] * (len(names) - len(args.defaults)) + [*args.defaults, *args.kw_defaults]
        before, self.frame = self.frame, frame.outer or self.frame
        for name, default in zip(known, defaults, strict=True):
            frame.names[name] = self.eval(default) if default is not None else unknown()
        self.frame = before
        spread = next((i for i, value in enumerate(given) if value.kind == "*"), len(given))
        frame.names.update(zip(names, given[:spread], strict=False))
        if args.vararg is not None:
            rest = given[len(names) :]
            frame.names[args.vararg.arg] = sequence(rest, "tuple") if spread == len(given) else Value("tuple")
        frame.names.update({name: value for name, value in kwargs.items() if name in known})
        if args.kwarg is not None:
            extra = {name: value for name, value in kwargs.items() if name not in known}
            frame.names[args.kwarg.arg] = Value("dict", attrs={"#entries": extra}, taint=Taint.NONE)
