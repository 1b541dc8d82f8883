"""Explains why a module's output differs, from the tensors at the modules' boundaries.

A cause is reported only if there is evidence for it: a setting that differs on exactly these ranks, other
random numbers, values rounded to a narrower type, a weight of an earlier step. Otherwise the place is
reported, and that the cause is not known.
"""

from __future__ import annotations

from paceline.finding import Finding
from paceline.verifying.case import Case, describe_settings, show_size
from paceline.verifying.layouts import EventDifference
from paceline.verifying.settings import FUNCTIONS, PROCESS

_CONTAINERS = {"ModuleList", "ModuleDict", "Sequential"}
# A difference of this share of a tensor's largest element is too large for rounding in any type in use.
_LARGE = 1e-3
# No rounding, to whatever type, moves an element by more than this share of the largest.
_MOST_ROUNDED = 1e-2


def explain_forward(case: Case) -> Finding:
    """Explain the first difference of a forward."""
    events = case.events(gradient=False)
    first = events[0]
    ranks = {d.rank for d in events if d.order == first.order}
    which = case.name_ranks(ranks)
    micro = f"microbatch {first.microbatch}"
    module, place = find_place(case, first)
    size = show_size(first)
    if first.event.is_weight:
        return _explain_weight(case, first, which, size)
    if first.event.side == "in" and not first.event.module:
        return Finding(
            "PL716",
            "the batch",
            f"The input of the model differs {which}, {micro}, {size}.",
            "Every layout trains on the same global batches.",
            "Check the data: an order, an augmentation or a step that depends on the rank.",
        )
    saw = f"The first difference {which} is {place}, {micro}, {size}."
    for explain in (
        explain_settings,
        _explain_type,
        _explain_received,
        _explain_draws,
        _explain_stale,
    ):
        found = explain(case, first, module, saw, ranks)
        if found is not None:
            return found
    return _explain_module(case, first, module, saw + case.describe_factor(first.factor, 1e-6))


def _explain_weight(case: Case, first: EventDifference, which: str, size: str) -> Finding:
    """Explain a module's forward that found another weight than the last update left."""
    name = first.event.weight
    finder = first.event.module or "the model"
    saw = f"The weight {name} that the forward of {finder} uses differs {which}, {size}"
    if first.rounded_to:
        return Finding(
            "PL712",
            first.event.module,
            f"{saw}: it is rounded to {first.rounded_to}.",
            f"dtype {case.dtype} computes and communicates in that type throughout.",
            f"Look for code that gathers or casts weights in {first.rounded_to}.",
        )
    if first.stale is not None:
        after = f"after step {first.stale}" if first.stale else "before the first step"
        saw += f": it is the weight as it was {after}"
    return Finding(
        "PL714",
        first.event.module,
        f"{saw}. The weights after the steps before agree.",
        "A forward uses the weights that the last update left.",
        "Look for weights that were gathered once and not again, for a copy, and for code that changes a "
        "weight between the update and the forward.",
    )


def explain_settings(
    case: Case, first: EventDifference, module: str, saw: str, ranks: set[int]
) -> Finding | None:
    """Explain a setting of the module, or a function, that differs on these ranks and no others."""
    found = case.settings_of(module, ranks)
    if not found and not case.settings_of(PROCESS, ranks) and not case.settings_of(FUNCTIONS, ranks):
        return None
    if found:
        kind = case.watched.modules[module].kind
        settings = f"Of {module or 'the model'} ({kind}), {describe_settings(case, found)}."
    else:
        others = [*case.settings_of(FUNCTIONS, ranks), *case.settings_of(PROCESS, ranks)]
        settings = f"There, {describe_settings(case, others)}."
    return Finding(
        "PL719",
        module,
        f"{saw} {settings}",
        "All ranks run the same code with the same settings.",
        "Look for code that sets this by rank or by world size: a configuration that only one rank reads, a "
        "patched function, a hook.",
    )


def _explain_received(
    case: Case, first: EventDifference, module: str, saw: str, ranks: set[int]
) -> Finding | None:
    """Explain a tensor that agrees on the stage that has made it, and not on one that has received it."""
    if not first.is_received:
        return None
    return Finding(
        "PL701",
        module,
        f"{saw} Another stage has this module: the rank has received the tensor.",
        "A stage computes on the outputs of earlier stages for the same microbatch.",
        "Check the messages between stages: their order, and buffers that are reused.",
    )


def _explain_draws(
    case: Case, first: EventDifference, module: str, saw: str, ranks: set[int]
) -> Finding | None:
    facts = case.watched.modules.get(module)
    dropout = 0.0 if facts is None else facts.dropout
    others = {name for o in case.observed if o.rank in ranks for name in o.other_draws}
    is_drawn = module in others or first.event.module in others
    is_dropout = facts is not None and "drop" in facts.kind.lower() and dropout > 0
    is_large = first.size > _LARGE * first.scale
    if not (first.looks_masked or is_drawn or (is_dropout and is_large)):
        return None
    why = f" {facts.kind} has dropout {dropout:g}." if facts is not None and dropout else ""
    why += " Other elements are 0, and the rest agrees." if first.looks_masked else ""
    why += " It drew other random numbers than one process." if is_drawn else ""
    return Finding(
        "PL702",
        module,
        f"{saw}{why}",
        "Random numbers depend on seed, step, sample and position only, never on the rank or layout.",
        "Draw them with nn.Dropout or torch's functions in the forward; seed a generator of your own by "
        "what is computed.",
    )


def _explain_type(
    case: Case, first: EventDifference, module: str, saw: str, ranks: set[int]
) -> Finding | None:
    computed = case.narrower(module) or case.narrower(first.event.module)
    kind = computed or (first.rounded_to if first.size < _MOST_ROUNDED * first.scale else "")
    if not kind or case.dtype not in ("fp64", "fp32"):
        return None
    why = f"This layout computes in {kind} there" if computed else f"Its values are rounded to {kind}"
    return Finding(
        "PL712",
        module,
        f"{saw} {why}, and one process does not.",
        f"dtype {case.dtype} computes and communicates in that type throughout.",
        f"Look for a cast to {kind}, or an autocast, that the layout adds.",
    )


def _explain_stale(
    case: Case, first: EventDifference, module: str, saw: str, ranks: set[int]
) -> Finding | None:
    found = [o.stale_copies[module] for o in case.observed if o.rank in ranks and module in o.stale_copies]
    if not found:
        return None
    name, step = found[0]
    after = f"after step {step}" if step else "before the first step"
    return Finding(
        "PL714",
        module,
        f"{saw} Its weights agree, but its attribute {name} holds one as it was {after}.",
        "A forward uses the weights that the last update left.",
        f"Compute {name} from the weight in every forward, or discard it after each optimizer step.",
    )


def _explain_module(case: Case, first: EventDifference, module: str, saw: str) -> Finding:
    facts = case.watched.modules.get(module)
    if facts is not None and facts.has_parameters and first.event.side == "out":
        saw += " Its input and its weights agree."
    if facts is not None and facts.dropout:
        saw += f" It has dropout {facts.dropout:g}."
    saw += case.describe_hooks(module)
    if case.layout.cp > 1:
        fix = (
            "Check what the ranks of cp exchange around this place, and in which order: rows for heads, and "
            "back. Masks and positions must be those of the whole sequence, or of just this rank's rows."
        )
    elif case.layout.tp > 1:
        fix = (
            "Check how this module is laid out: a missing sum over tp after a matrix product that was split "
            "by rows, heads or vocabulary that are not split as the weights are, a copy that changed."
        )
    else:
        fix = (
            "Check what this code uses besides its input and weights: something that depends on the rank or "
            "the world size, a value from an earlier forward, its own collective."
        )
    return Finding("PL701", module, saw, "A module gives the same output under every layout.", fix)


def find_place(case: Case, first: EventDifference) -> tuple[str, str]:
    """Return the module that a forward difference is attributed to, and the place in it."""
    event = first.event
    if event.side == "out":
        return event.module, f"in the output of {event.module or 'the model'}"
    parent = find_parent(case, event.module)
    before = _find_earlier(case, first.order, parent)
    between = f" after {before} and" if before else ""
    return parent, f"in the code of {parent or 'the model itself'},{between} before {event.module}"


def find_parent(case: Case, module: str) -> str:
    """Return the module whose code calls a module: the next one above it that is not a container."""
    parent = module.rpartition(".")[0]
    modules = case.watched.modules
    while parent and parent in modules and modules[parent].kind in _CONTAINERS:
        parent = parent.rpartition(".")[0]
    return parent


def _find_earlier(case: Case, order: int, parent: str) -> str:
    """Return the last child of a module whose output came before an event."""
    best, found = -1, ""
    for text, number in case.watched.order.items():
        name, _, side, _ = text.rsplit("|", 3)
        if (
            side == "out"
            and best < number < order
            and name.startswith(f"{parent}." if parent else "")
            and name
        ):
            best, found = number, name
    return found
