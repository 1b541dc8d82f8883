"""Evaluates the expressions of a script abstractly."""

from __future__ import annotations

import ast
import builtins
import operator
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from paceline.lint import facts, library
from paceline.lint.scopes import Function, ScriptFrame
from paceline.lint.values import Taint, Value, WitnessPlace, constant, join, mix, sequence, tainted, unknown

if TYPE_CHECKING:
    from paceline.lint.trace import TraceEvent

# The names of `ast`, and those of `operator` where they differ by more than case.
_ALIKE = ("Add", "Sub", "Mod", "Lt", "Gt", "Eq")
_UNLIKE = "Mult mul, Div truediv, FloorDiv floordiv, BitAnd and_, BitOr or_, NotEq ne, LtE le, GtE ge"
_NAMES = [(name, name.lower()) for name in _ALIKE] + [tuple(pair.split()) for pair in _UNLIKE.split(", ")]
_OPERATORS = {name: getattr(operator, other) for name, other in _NAMES}
_BUILTINS = set(dir(builtins))
_LONGEST = 10_000
_MOST_STEPS = 60_000
_MOST_KEPT = 16


class GaveUp(Exception):  # noqa: N818 (it ends a search, and is no error)
    """Raised when a script takes too many steps."""


class Evaluator:
    """Expressions under one witness, with the state of the process that they read."""

    frame: ScriptFrame

    # Provided by the interpreter.
    emit: Callable[..., TraceEvent]
    set: Any
    fork: Callable[..., frozenset[str]]
    assign: Callable[[ast.AST, Value], None]
    call_function: Callable[..., Value]
    loops: tuple[int, ...]

    def __init__(self, place: WitnessPlace) -> None:
        self._place = place
        self.has_asked = False  # for a number of its place
        self.meant: set[int] = set()  # ranks that the script compares its own with
        self.builtins: dict[str, Value] = {}  # that the script has replaced
        self.has_torch = False  # is imported
        self.is_spawned = False
        self.initialized: bool | None = False  # None: on some paths
        self.is_assumed = False  # of a function that nobody in the file calls
        self.seed: int | None = None  # origins of the last seed of torch
        self.num_joins = 0
        self.num_unread_calls = 0
        self.no_sync: list[Value] = []
        self.no_grad = 0
        self.steps = 0
        self._methods: dict[type[ast.AST], Any] = {}

    @property
    def place(self) -> WitnessPlace:
        """The place at which it runs."""
        self.has_asked = True
        return self._place

    @place.setter
    def place(self, place: WitnessPlace) -> None:
        self._place = place

    @property
    def is_started(self) -> bool:
        """Whether the process group is there for certain."""
        return self.initialized is True and not self.is_assumed

    def eval(self, node: ast.AST) -> Value:
        """Return the value of an expression."""
        method = self.find_method("_eval_", node)
        if method is None:
            for child in ast.iter_child_nodes(node):
                if isinstance(child, ast.expr):
                    self.eval(child)
            return unknown()
        value: Value = method(node)
        return value

    def find_method(self, prefix: str, node: ast.AST) -> Any:
        """Count a step, give up after very many, and return the method for a kind of node, or None."""
        self.steps += 1
        if self.steps > _MOST_STEPS:
            raise GaveUp
        kind = type(node)
        if kind not in self._methods:
            name = kind.__name__.lower().removeprefix("async").removesuffix("star")
            self._methods[kind] = getattr(self, prefix + name, None)
        return self._methods[kind]

    def truth(self, value: Value) -> bool | None:
        """Return whether a value is true, or None if that is not known."""
        if value.is_known:
            try:
                return bool(value.const)
            except Exception:
                return None
        if value.kind in ("list", "tuple"):
            return bool(value.items) if value.items is not None else None
        if value.kind in ("", "union", "tensor", "dict", "state", "instance", "dataset"):
            return None
        return True

    def _eval_constant(self, node: ast.Constant) -> Value:
        return constant(node.value)

    def _eval_name(self, node: ast.Name) -> Value:
        frame: ScriptFrame | None = self.frame
        while frame is not None:
            if node.id in frame.names and not (frame is not self.frame and frame.is_class):
                return frame.names[node.id]
            frame = frame.outer
        if node.id in self.builtins:
            return self.builtins[node.id]
        if node.id in _BUILTINS:
            return Value("lib", ref="builtins." + node.id)
        return unknown()

    def _eval_attribute(self, node: ast.Attribute) -> Value:
        return library.get_attribute(self, self.eval(node.value), node.attr, node)

    def _eval_subscript(self, node: ast.Subscript) -> Value:
        return library.get_item(self, self.eval(node.value), self.eval(node.slice), node)

    def _eval_slice(self, node: ast.Slice) -> Value:
        bounds = (node.lower, node.upper, node.step)
        parts = [self.eval(part) if part is not None else constant(None) for part in bounds]
        return Value("slice", taint=mix(parts), ref=tuple(parts))

    def _eval_starred(self, node: ast.Starred) -> Value:
        value = self.eval(node.value)
        return Value("*", ref=value, taint=value.taint, deps=value.deps)

    def _spread(self, nodes: Sequence[ast.expr]) -> list[Value]:
        """Return the elements of a list or the arguments of a call; one with a star may stand for several."""
        found: list[Value] = []
        for value in map(self.eval, nodes):
            items = value.ref.items if value.kind == "*" else None
            found += [value] if items is None else items
        return found

    def _eval_list(self, node: ast.List | ast.Tuple | ast.Set) -> Value:
        items = self._spread(node.elts)
        result = sequence(items, "tuple" if isinstance(node, ast.Tuple) else "list")
        if any(item.kind == "*" for item in items):
            result.attrs["#items"] = None
        return result

    _eval_set = _eval_tuple = _eval_list

    def _eval_dict(self, node: ast.Dict) -> Value:
        entries: dict[str, Value] | None = {}
        values = []
        for key, value_node in zip(node.keys, node.values, strict=True):
            value = self.eval(value_node)
            values.append(value)
            name = self.eval(key) if key is not None else unknown()
            if entries is not None and key is not None and name.is_known:
                entries[str(name.const)] = value
            else:
                entries = None
        return Value("dict", taint=mix(values), deps=facts.deps_of(values), attrs={"#entries": entries})

    def _eval_lambda(self, node: ast.Lambda) -> Value:
        return Value("func", ref=Function(node, self.frame, self.frame.module), node=node)

    def _eval_namedexpr(self, node: ast.NamedExpr) -> Value:
        value = self.eval(node.value)
        self.assign(node.target, value)
        return value

    def _eval_yield(self, node: ast.Yield | ast.YieldFrom) -> Value:
        value = self.eval(node.value) if node.value is not None else constant(None)
        value = self.element(value, 0) if isinstance(node, ast.YieldFrom) else value
        old = self.frame.names.get("#yields")
        self.frame.names["#yields"] = value if old is None else join(old, value)
        return unknown()

    _eval_yieldfrom = _eval_yield

    def _eval_joinedstr(self, node: ast.JoinedStr) -> Value:
        parts = [self.eval(part) for part in node.values]
        if all(part.is_known for part in parts):
            return Value(const="".join(str(part.const) for part in parts), taint=mix(parts))
        return unknown(mix(parts))

    def _eval_formattedvalue(self, node: ast.FormattedValue) -> Value:
        value = self.eval(node.value)
        return value if node.format_spec is None and node.conversion == -1 else unknown(value.taint)

    def _eval_ifexp(self, node: ast.IfExp) -> Value:
        condition = self.eval(node.test)
        truth = self.truth(condition)
        if truth is not None:
            return tainted(self.eval(node.body if truth else node.orelse), condition.taint)
        arms = [partial(self.eval, node.body), partial(self.eval, node.orelse)]
        found = self.fork_values(node, condition, arms)
        return join(found[0], found[1], condition.taint & (Taint.LOCAL | Taint.RANK))

    def fork_values(
        self, node: ast.AST, condition: Value, arms: Sequence[Callable[[], Value]]
    ) -> list[Value]:
        """Return what several arms give from the same state."""
        found: list[Value] = []

        def run(arm: Callable[[], Value]) -> frozenset[str]:
            found.append(arm())
            return frozenset({"next"})

        self.fork(node, condition, [partial(run, arm) for arm in arms])
        return found

    def _eval_boolop(self, node: ast.BoolOp) -> Value:
        """Return `a and (b and c)`, where what comes after an unknown `a` is an arm of a branch."""
        stops = isinstance(node.op, ast.Or)
        first, rest = self.eval(node.values[0]), node.values[1:]
        part = rest[0] if len(rest) == 1 else ast.copy_location(ast.BoolOp(node.op, rest), node)
        truth = self.truth(first)
        if truth is not None:
            return first if truth is stops else tainted(self.eval(part), first.taint)
        arms: list[Callable[[], Value]] = [partial(self.eval, part), lambda: first]
        found = self.fork_values(node, first, arms[::-1] if stops else arms)
        other = found[-1 if stops else 0]
        if other.is_known and bool(other.const) is stops:
            return Value(const=other.const, taint=first.taint | other.taint)
        window = first.fact("window") or other.fact("window")
        return Value(taint=first.taint | other.taint, attrs={"#window": window})

    def _eval_unaryop(self, node: ast.UnaryOp) -> Value:
        value = self.eval(node.operand)
        if isinstance(node.op, ast.Not):
            truth = self.truth(value)
            if truth is not None:
                return Value(const=not truth, taint=value.taint)
            return Value(taint=value.taint, attrs={"#window": value.fact("window")})
        if value.is_known and isinstance(node.op, ast.USub):
            with suppress(TypeError):
                return constant(-value.const, value.taint)
        return Value(value.kind if value.kind == "tensor" else "", taint=value.taint, deps=value.deps)

    def _eval_binop(self, node: ast.BinOp) -> Value:
        return self.binary(self.eval(node.left), node.op, self.eval(node.right), node)

    def binary(self, left: Value, op: ast.operator, right: Value, node: ast.AST) -> Value:
        """Return the result of an operator."""
        taint, deps = left.taint | right.taint, left.deps | right.deps
        parts = (left, right) if isinstance(op, (ast.Div, ast.Mult)) else ()
        if any(one.fact("world") or one.fact("reduced") for one in parts):
            self.emit("scaled", node)
        if left.is_known and right.is_known and type(op).__name__ in _OPERATORS:
            is_long = isinstance(left.const, (str, tuple, list)) and isinstance(right.const, int)
            if not (is_long and right.const > _LONGEST):
                with suppress(Exception):
                    result = constant(_OPERATORS[type(op).__name__](left.const, right.const), taint)
                    facts.keep_facts(result, left, op, right)
                    return result
        kind = "tensor" if "tensor" in (left.kind, right.kind) else ""
        result = Value(kind, taint=taint, deps=deps, node=node)
        facts.keep_facts(result, left, op, right)
        if parts and left.fact("reduced") and left.deps and right.fact("world") and self.no_grad == 0:
            result.attrs["#averaged"] = True
        if isinstance(op, ast.Div) and left.fact("reduced") and right.fact("devices") and not self.is_spawned:
            self.emit("device_count", node)
        return result

    def _eval_compare(self, node: ast.Compare) -> Value:
        left = self.eval(node.left)
        found = []
        for op, part in zip(node.ops, node.comparators, strict=True):
            right = self.eval(part)
            found.append(self._compare(left, op, right))
            left = right
        return next((one for one in found if not (one.is_known and one.const)), found[-1])

    def _compare(self, left: Value, op: ast.cmpop, right: Value) -> Value:
        taint = left.taint | right.taint
        if isinstance(op, (ast.Is, ast.IsNot, ast.In, ast.NotIn)):
            is_in = isinstance(op, (ast.In, ast.NotIn))
            found = facts.contains(right, left) if is_in else facts.is_same(left, right)
            if found is None:
                return unknown(taint)
            return constant(found is isinstance(op, (ast.Is, ast.In)), taint)
        if left.is_known and right.is_known:
            for one, other in ((left, right), (right, left)):
                if one.fact("rank") and isinstance(op, (ast.Eq, ast.NotEq)) and other.const in range(16):
                    self.meant.add(int(other.const))
            with suppress(Exception):
                return constant(_OPERATORS[type(op).__name__](left.const, right.const), taint)
        result = unknown(taint)
        if (left.fact("number") and right.is_none) and isinstance(op, (ast.Eq, ast.NotEq)):
            return constant(isinstance(op, ast.NotEq), taint)
        window = left.fact("window") or right.fact("window")
        if window and isinstance(op, (ast.Eq, ast.NotEq)):
            result.attrs["#window"] = window
        return result

    def _comprehension(self, node: Any) -> Value:
        generators: list[ast.comprehension] = node.generators
        source = self.eval(generators[0].iter)
        items = facts.known_items(source)
        if items is not None and len(generators) == 1 and len(items) <= _MOST_KEPT and hasattr(node, "elt"):
            kept = self._each(node, generators[0], items)
            if kept is not None:
                result = sequence(kept)
                facts.inherit(result, [source])
                return result
        sources = [source]
        for i, generator in enumerate(generators):
            if i > 0:
                sources.append(self.eval(generator.iter))
            self.assign(generator.target, library.iterate(self, sources[i], generator.iter))
            for test in generator.ifs:
                self.eval(test)
        value = self.eval(node.elt if hasattr(node, "elt") else node.value)
        taint, deps = mix([value, *sources]), facts.deps_of((value, *sources))
        kind = "list" if hasattr(node, "elt") else "dict"
        result = Value(kind, taint=taint, deps=deps, node=node, attrs={"#element": value})
        count = facts.known_length(source)
        if kind == "list" and count is not None and len(generators) == 1 and not generators[0].ifs:
            result.attrs["#items"] = (value,) * min(count, _LONGEST)
        facts.inherit(result, sources)
        return result

    def _each(self, node: Any, generator: ast.comprehension, items: tuple[Value, ...]) -> list[Value] | None:
        """Return the elements of a short comprehension, or None if a condition is not known."""
        kept = []
        for item in items:
            self.assign(generator.target, item)
            truths = [self.truth(self.eval(test)) for test in generator.ifs]
            if None in truths:
                return None
            if all(truths):
                kept.append(self.eval(node.elt))
        return kept

    _eval_listcomp = _eval_generatorexp = _eval_setcomp = _eval_dictcomp = _comprehension

    def element(self, value: Value, index: int) -> Value:
        """Return an element of what is unpacked or iterated."""
        element: Value | None = value.fact("element")
        if element is not None:
            return element
        taint = value.taint if not value.kind.startswith("lib") else Taint.UNKNOWN
        result = Value("tensor" if value.kind == "tensor" else "", taint=taint, deps=value.deps)
        facts.inherit(result, [value])
        if value.fact("part"):
            result.attrs["#part"] = True
        return result

    def _eval_call(self, node: ast.Call) -> Value:
        is_method = isinstance(node.func, ast.Attribute)
        callee = self.eval(node.func.value if isinstance(node.func, ast.Attribute) else node.func)
        name = getattr(node.func, "attr", "")
        call = facts.KnownCall(self, self._spread(node.args), {}, node, name, callee)
        for keyword in node.keywords:
            value = self.eval(keyword.value)
            if keyword.arg is not None:
                call.kwargs[keyword.arg] = value
            else:
                call.kwargs |= value.fact("entries") or {"**": value}
        return library.call_method(call) if is_method else library.call(call, callee)
