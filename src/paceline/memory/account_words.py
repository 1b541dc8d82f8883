"""Words an account of a rank's memory."""

from __future__ import annotations

from collections.abc import Iterator

from paceline.memory.account import KINDS, Account, Holder, ModuleMemory
from paceline.memory.advice import MemorySettings, Remedy, estimate_now, find_room, list_remedies
from paceline.memory.causes import find_cause, find_growth
from paceline.memory.live_modules import OUTSIDE
from paceline.phrases import join
from paceline.units import format_bytes

CODE = "PL914"
_MANY = 3
_MANY_REMEDIES = 4
# Smaller parts are summed up in the last line.
_LEAST = 0.01
_LIMITS = {
    "cgroup": "the limit of its cgroup (container, job)",
    "machine": "the memory of this machine",
    "device": "the memory of its device",
}


def describe(account: Account, settings: MemorySettings | None = None) -> str:
    """Return an account as lines: the cause, the composition, the growth and what would have fitted."""
    remedies = list_remedies(account, settings)[:_MANY_REMEDIES]
    lines = [describe_without_remedies(account)]
    if remedies:
        lines.append("What saves memory, in proportion to the parts above:")
        lines += [f"  - {describe_remedy(one)}" for one in remedies]
    lines[-1] += f" [{CODE}]"
    return "\n".join(lines)


def describe_without_remedies(account: Account) -> str:
    """Return the cause, the composition, the growth and what a whole step needs, as lines."""
    room, need = find_room(account), estimate_now(account)
    over = f", {format_bytes(need - room)} too much" if room and need > room else ""
    lines = [describe_cause(account), *_list_parts(account), *_describe_growth(account)]
    return "\n".join([*lines, f"A whole step needs about {format_bytes(need)}{over}."])


def describe_remedy(remedy: Remedy) -> str:
    """Return a setting, what it saves, and whether that would have been enough."""
    enough = "would have fitted" if remedy.fits else "not enough alone"
    return f"{remedy.words}: saves about {format_bytes(remedy.saves)}, {enough}."


def describe_cause(account: Account) -> str:
    """Return one sentence: what filled the memory, and where."""
    cause = find_cause(account)
    where = f" at {account.progress.place}" if account.progress.place else ""
    holder = next((one for one in account.holders if bool(one.graphs) == (cause == "kept graphs")), None)
    if cause == "kept graphs" and holder is not None:
        return (
            f"Graphs of earlier forwards filled the memory{where}: {holder.variable} in {holder.place} keeps "
            f"{holder.graphs} of them, {format_bytes(holder.num_bytes)}."
        )
    if cause == "kept" and holder is not None:
        return (
            f"{holder.variable} in {holder.place} filled the memory: {holder.count} tensors or arrays with "
            f"{format_bytes(holder.num_bytes)}."
        )
    text = {
        "evaluation": "The model is in evaluation mode, and its forward saves "
        f"{_size(account, 'activations')} for a backward that does not come: torch.no_grad() is missing"
        f"{where}.",
        "activations": f"Activations filled the memory{where}: "
        f"{_size(account, 'activations')}{_name_largest(account)}.",
        "request": f"One allocation of {_size(account, 'request')} did not fit"
        f"{where}{_name_running(account)}.",
        "model state": f"The model's state filled the memory{where}: parameters, gradients and optimizer "
        f"state take {format_bytes(_count_state(account))}.",
        "batch": f"The batch filled the memory{where}: {_size(account, 'batch')}{_name_inputs(account)}.",
        "loader workers": f"{account.num_workers} loader workers filled the memory: "
        f"{_size(account, 'loader workers')}.",
        "other processes": f"Other processes filled the memory: {_size(account, 'other processes')}.",
        "growth": "Something that is not a tensor filled the memory: it grew by "
        f"{format_bytes(account.steps.growth)} per step.",
    }
    return text.get(cause, f"The memory ran out{where}: the largest part is not a tensor of this process.")


def _size(account: Account, kind: str) -> str:
    return format_bytes(account.get(kind))


def _count_state(account: Account) -> int:
    return account.get("parameters", "gradients", "optimizer", "buffers", "gathered")


def name_module(module: ModuleMemory) -> str:
    """Return a module's name with its class: `blocks.3.attn (Attention)`."""
    if module.name == OUTSIDE:
        return "the operations after the last module"
    name = module.name or "the model"
    return f"{name} ({module.kind})" if module.kind else name


def _name_largest(account: Account) -> str:
    top = [f"{name_module(one)} {format_bytes(one.num_bytes)}" for one in account.modules[:_MANY]]
    return f", most of it in {join(top)}" if top else ""


def _name_running(account: Account) -> str:
    module = account.progress.module
    if module is None:
        return ""
    return f", in {module or 'the model'} ({account.progress.module_kind})"


def _name_inputs(account: Account) -> str:
    inputs = [f"{one.variable} {list(one.shape)} {one.dtype}" for one in account.batch[:_MANY]]
    return f", {join(inputs)}" if inputs else ""


def _list_parts(account: Account) -> Iterator[str]:
    limit = f" of {format_bytes(account.limit)}, {_LIMITS[account.limit_kind]}" if account.limit else ""
    yield f"  {format_bytes(account.used)} were in use{limit}; this rank's part:"
    small = 0
    for kind, name in KINDS.items():
        size = account.get(kind)
        if size and size < _LEAST * account.total:
            small += size
        elif size:
            yield f"  {format_bytes(size):>11}  {name}"
            if kind == "activations":
                yield from map(_describe_module, account.modules[:_MANY])
            if kind in ("kept", "kept graphs"):
                held = [one for one in account.holders if bool(one.graphs) == (kind == "kept graphs")]
                yield from map(_describe_holder, held[:_MANY])
    if small:
        yield f"  {format_bytes(small):>11}  other parts, each below {_LEAST:.0%}"


def _describe_module(module: ModuleMemory) -> str:
    return f"  {'':>11}    {format_bytes(module.num_bytes):>11}  {name_module(module)}"


def _describe_holder(holder: Holder) -> str:
    return f"  {'':>11}    {format_bytes(holder.num_bytes):>11}  {holder.variable} in {holder.place}"


def _describe_growth(account: Account) -> Iterator[str]:
    steps, growth = account.steps, find_growth(account)
    if growth == "no steps":
        yield "No step had fitted before."
    elif growth == "leak":
        yield (
            f"{steps.count} steps had fitted, and each left {format_bytes(steps.growth)} behind: "
            f"{format_bytes(steps.first)} after the second, {format_bytes(steps.last)} after the last."
        )
    elif growth == "jump":
        yield (
            f"{steps.count} steps had fitted in {format_bytes(steps.peak)}. This one needs more than "
            f"{format_bytes(account.own)}: its batch is larger or its samples are longer"
            f"{_name_inputs(account)}."
        )
    else:
        several = "s" * (steps.count > 1)
        yield f"{steps.count} step{several} had fitted, in at most {format_bytes(steps.peak)}."
