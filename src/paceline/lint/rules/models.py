"""Rules on wrapping a model."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence

from paceline.lint.rules.rule import Spot, WitnessTrace, at, name_of, rule
from paceline.lint.trace import BranchItem, TraceEvent, events, walk
from paceline.lint.values import Value, words

_WITH_PARAMETERS = words("""
    Linear Bilinear Conv1d Conv2d Conv3d ConvTranspose1d ConvTranspose2d ConvTranspose3d Embedding
    EmbeddingBag LayerNorm RMSNorm GroupNorm LSTM GRU MultiheadAttention TransformerEncoderLayer
""")
_WALKS = re.compile(
    r"\b(children|modules|named_children|named_modules|parameters|named_parameters|__dict__|_modules|vars|getattr|eval|exec)\b"
)
# A method of these names is nn.Module's on the wrapper too.
_OF_MODULE = words("""
    forward train eval parameters named_parameters modules named_modules children named_children buffers
    named_buffers state_dict load_state_dict to cuda cpu half float double bfloat16 type apply zero_grad
    requires_grad_ training device module no_sync join register_buffer register_parameter
    register_forward_hook register_forward_pre_hook add_module register_full_backward_hook
    register_module get_submodule get_parameter get_buffer share_memory extra_repr compile
    register_comm_hook device_ids output_device process_group find_unused_parameters
    require_backward_grad_sync broadcast_buffers dim reducer logger static_graph gradient_as_bucket_view
    clip_grad_norm_ xpu to_empty set_extra_state get_extra_state device_type
    register_state_dict_pre_hook parameters_to_ignore
""")


@rule("PL054")
def frozen_after_wrapping(witnesses: Sequence[WitnessTrace]) -> Iterator[Spot]:
    """Report requires_grad that changes after DDP has counted the parameters."""
    witness = witnesses[0]
    items = [item for item in walk(witness.items) if isinstance(item, TraceEvent)]
    arms = [arm for item in walk(witness.items) if isinstance(item, BranchItem) for arm in item.arms]
    partly = {id(event.node) for arm in arms for event in events(arm, "requires_grad")}
    for i, event in enumerate(items):
        if event.kind != "requires_grad" or not event.value.is_known:
            continue
        touched = {event.target, *event.target.deps}
        for wrapper in _wrappers(items[:i]):
            if wrapper.fact("find_unused_parameters") or wrapper.kind != "ddp" or wrapper.fact("escaped"):
                continue
            inner = set(wrapper.attrs["module"].alternatives())
            if wrapper not in touched and not {one for one in inner if one.kind == "model"} & touched:
                continue
            if not event.value.const and not event.target.fact("part") and id(event.node) not in partly:
                continue  # a teacher: without any gradient there is no backward
            later = items[i:]
            if any(other.kind == "wrap" and inner & set(other.module.alternatives()) for other in later):
                continue
            toggled = [
                other
                for other in items
                if other.kind == "requires_grad" and ({wrapper} | inner) & {other.target, *other.target.deps}
            ]
            values = {
                bool(other.value.const)
                for other in toggled
                if other.value.is_known and wrapper in _wrappers(items[: items.index(other)])
            }
            if len(values) == 1 and any(
                other.kind == "backward" and wrapper in other.deps for other in items
            ):
                yield at(event, "requires_grad changes after DDP has wrapped the model.")


def _wrappers(items: Sequence[TraceEvent]) -> list[Value]:
    return [item.wrapper for item in items if item.kind == "wrap"]


@rule("PL060")
def unused_parameters(witnesses: Sequence[WitnessTrace]) -> Iterator[Spot]:
    """Report a layer that `__init__` makes and nothing uses, in a model that DDP wraps without a search."""
    witness = witnesses[0]
    for event in witness.events("wrap"):
        if event.what != "ddp" or event.wrapper.fact("find_unused_parameters") is not None or event.extra:
            continue
        if event.wrapper.fact("static_graph"):
            continue
        for model in event.module.alternatives():
            if model.kind != "model" or model.script_class is None:
                continue
            lineage = list(model.ref.lineage())
            is_plain = len(lineage) == 1 and set(model.ref.library_bases()) == {"nn.Module"}
            if not is_plain or model.ref.find("forward") is None:
                continue
            if not any(event.wrapper in other.deps for other in witness.events("backward")):
                continue
            for name in _unused(lineage[0].node, lineage[0].module.text):
                saw = f"the layer `{name}` of {lineage[0].node.name} is never used, so it gets no gradient."
                yield at(event, saw)


def _unused(cls: ast.ClassDef, text: str) -> Iterator[str]:
    methods = [node for node in cls.body if isinstance(node, ast.FunctionDef)]
    init = next((node for node in methods if node.name == "__init__"), None)
    if init is None or _WALKS.search(ast.unparse(cls)):
        return
    if any(isinstance(node, ast.Name) and node.id == "self" for node in _bare_uses(cls)):
        return
    for statement in init.body:
        if not isinstance(statement, ast.Assign) or not isinstance(statement.value, ast.Call):
            continue
        target = statement.targets[0]
        made = statement.value.func
        last = made.attr if isinstance(made, ast.Attribute) else getattr(made, "id", "")
        name = getattr(target, "attr", "")
        is_own = bool(name) and getattr(getattr(target, "value", None), "id", "") == "self"
        if is_own and last in _WITH_PARAMETERS and len(statement.targets) == 1:
            code = re.sub(r"#.*", "", text)
            if len(re.findall(rf"\b{re.escape(name)}\b", code)) == 1:
                yield name


def _bare_uses(cls: ast.ClassDef) -> Iterator[ast.AST]:
    """Yield `self` where it is given away, except to `super`."""
    for node in ast.walk(cls):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") != "super":
            yield from (arg for arg in node.args if isinstance(arg, ast.Name))


@rule("PL065", "warning")
def data_parallel(witnesses: Sequence[WitnessTrace]) -> Iterator[Spot]:
    """Report DataParallel in a process that is one of several ranks."""
    for event in witnesses[0].events("wrap"):
        if event.what == "dp" and event.started is True:
            yield at(event, "each rank would run on all devices of its node.")


@rule("PL074")
def attribute_of_the_wrapper(witnesses: Sequence[WitnessTrace]) -> Iterator[Spot]:
    """Report an attribute of the inner module that is read from the wrapper."""
    for event in witnesses[0].events("wrapper_attribute"):
        wrapper, name = event.wrapper, event.name
        inner: Value = wrapper.attrs["module"]
        if wrapper.kind != "ddp" or inner.kind != "model" or inner.script_class is None:
            continue
        if name in _OF_MODULE or name.startswith("__") or wrapper.fact("escaped"):
            continue
        part = inner.attrs.get(name)
        own = inner.ref.find(name) is not None or (isinstance(part, Value) and part.node)
        assigned = any(
            isinstance(node, ast.Attribute)
            and node.attr == name
            and isinstance(node.ctx, ast.Store)
            and getattr(node.value, "id", "") == "self"
            for one in inner.ref.lineage()
            for node in ast.walk(one.node)
        )
        if own or assigned:
            yield at(event, f"`{name_of(event.node)}`: DDP has no `{name}`; the module inside has it.")
