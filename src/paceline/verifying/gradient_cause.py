"""Explains why gradients differ although every module's output agrees.

If gradients differ at the modules' boundaries too, backward went wrong inside a module. Else it is the sum of
the microbatches' gradients, over the ranks or over the microbatches.
"""

from __future__ import annotations

from paceline.finding import Finding
from paceline.phrases import name_some
from paceline.verifying.case import Case, near, show_size
from paceline.verifying.forward_cause import explain_settings, find_parent
from paceline.verifying.settings import FUNCTIONS, OPTIMIZER

# The place of causes that belong to the reduction and to no module.
_PLACE = "the sum of gradients"
# A share of all gradients; if fewer differ, one module may be the cause.
_NEARLY_ALL = 0.8
_SUM_RULE = "The gradient is the sum over all microbatches of the global batch, each of them once."


def explain(case: Case) -> Finding | None:
    """Return the cause of differing gradients; `None` if they agree."""
    if not case.of_kind("gradient"):
        return None
    found = _explain_absent(case) or _explain_rounding(case)
    if found is not None:
        return found
    if case.events(gradient=True):
        return _explain_backward(case)
    return _explain_sum(case) or _explain_parameters(case)


def _explain_sum(case: Case) -> Finding | None:
    """Explain that nearly all gradients differ though every module's is right: the sum of them is wrong."""
    differing = case.of_kind("gradient")
    names = {d.name for d in differing}
    known, is_tied = case.watched.parameters, names <= case.tied
    # A stage has a sum of its own, and so has a half of a backward.
    is_stage = case.layout.pp > 1 and len({name.rpartition(".")[0] for name in names}) > 2
    if is_tied or not (is_stage or len(names) >= _NEARLY_ALL * len(known)):
        return None
    which = case.name_ranks(d.rank for d in differing)
    saw = f"All outputs agree, but the gradient of {len(names)} parameters "
    factor = differing[0].factor
    if factor is None or near(factor, 1.0) or not all(d.factor and near(d.factor, factor) for d in differing):
        return Finding(
            "PL703",
            _PLACE,
            f"{saw}differs {case.describe(differing)}, by no common factor. "
            "In every module, the gradient of each microbatch agrees.",
            _SUM_RULE,
            "Look for what enters the sum: a reduction that is missing or has another group, a microbatch or "
            "a rank left out, an idle round, gradients that are overwritten, or scaled and clipped before "
            "they are summed.",
        )
    summed, averaged = case.name_degree(factor), case.name_degree(1 / factor) if factor else None
    if summed is not None:
        saw += f"is {factor:.4g} times the reference's {which}: summed over {summed} again."
        fix = "Look for a second sum over that axis, or a mean that should follow the sum and does not."
    elif averaged is not None:
        saw += f"is 1/{1 / factor:.4g} of the reference's {which}: averaged over {averaged} as well."
        fix = "Look for a mean over that axis in addition to the division by the weight of the global batch."
    else:
        saw += f"is {factor:.6g} times the reference's {which}."
        fix = "Look for what scales all gradients: clipping before the sum, a loss scale, a second backward."
    return Finding("PL703", _PLACE, saw, _SUM_RULE, fix)


def _explain_rounding(case: Case) -> Finding | None:
    """Explain gradients that a narrower type has rounded."""
    differing = case.of_kind("gradient")
    rounded = [d for d in differing if d.rounded_to]
    computed = "" if case.events(gradient=True) else case.narrower(None)
    if case.dtype not in ("fp64", "fp32") or (not computed and len(rounded) < 0.8 * len(differing)):
        return None
    kind = rounded[0].rounded_to if rounded else computed
    names = name_some([d.name for d in rounded or differing])
    why = f"rounded to {kind}" if rounded else f"others, and this layout computes in {kind} behind backward"
    return Finding(
        "PL712",
        _PLACE,
        f"All outputs agree, but {len(rounded or differing)} of {len(differing)} gradients that differ, "
        f"{names}, are {why}, {case.name_ranks(d.rank for d in rounded or differing)}.",
        f"dtype {case.dtype} computes and communicates in that type throughout.",
        f"Look for a reduction that sends {kind}, or a shard's reduce_dtype.",
    )


def _explain_absent(case: Case) -> Finding | None:
    """Explain parameters that the optimizer of a rank does not have."""
    names = {d.name for d in case.of_kind("gradient")} | {d.name for d in case.of_kind("weight")}
    absent = [d for d in case.settings if d.owner == OPTIMIZER and not d.found and d.name in names]
    if not absent:
        return None
    return Finding(
        "PL709",
        absent[0].name,
        f"All outputs agree, but the optimizer does not have {name_some([d.name for d in absent])} "
        f"{case.name_ranks(d.rank for d in absent)}.",
        "Every rank's optimizer has the same parameters, in the same groups.",
        "Check the function that builds the optimizer: its choice of parameters may depend on the rank.",
    )


def _explain_backward(case: Case) -> Finding:
    events = case.events(gradient=True)
    first = events[0]
    same = [d for d in events if d.order == first.order]
    which = case.name_ranks(d.rank for d in same)
    name = first.event.module or "the model itself"
    if first.event.side == "in":
        saw = f"the gradient that {name} gives to its input differs {which}"
        module = first.event.module
    else:
        saw = f"the gradient that arrives at the output of {name} differs {which}"
        module = first.event.module
    ranks = {d.rank for d in same}
    if case.settings_of(module, ranks) or case.settings_of(FUNCTIONS, ranks):
        saw = f"All outputs agree; in backward {saw}, {show_size(first)}."
        found = explain_settings(case, first, module, saw, ranks)
        assert found is not None
        return found
    more = case.describe_factor(first.factor) + _list_apart(case, find_parent(case, module))
    more += case.describe_hooks(module)
    return Finding(
        "PL707",
        module,
        f"All outputs agree; in backward {saw}, microbatch {first.microbatch}, "
        f"{show_size(first)}.{more} All gradients behind it agree.",
        "Backward through a module gives the same gradients under every layout.",
        "Check the backward of what follows this place: "
        + ("a missing or duplicate sum over tp, " if case.layout.tp > 1 else "")
        + ("rows or heads that an exchange over cp loses or repeats, " if case.layout.cp > 1 else "")
        + ("a gradient that is lost or doubled between stages, " if case.layout.pp > 1 else "")
        + ("what the loss is divided by, " if not module and first.event.side == "out" else "")
        + "a hook or a custom backward, a tensor changed in place.",
    )


def _list_apart(case: Case, parent: str) -> str:
    """Return a sentence on the parameters of a module that alone have another gradient; empty for none.

    Several children share the gradient of their common input; it shows which of them it came through.
    """
    own = [name for name in case.watched.parameters if name.startswith(f"{parent}.")]
    differing = {d.name for d in case.of_kind("gradient")}
    apart = [name for name in own if name in differing]
    if not parent or not apart or len(apart) == len(own):
        return ""
    return f" Of the parameters in {parent}, only {name_some(apart)} has a different gradient."


def _explain_parameters(case: Case) -> Finding:
    """Explain that all outputs and their gradients agree, but the gradients of some parameters do not."""
    differing = case.of_kind("gradient")
    names = [d.name for d in differing]
    first = differing[0]
    if set(names) <= case.tied:
        return Finding(
            "PL711",
            first.name,
            f"Only the gradients of tied parameters differ ({name_some(names)}) {case.describe(differing)}.",
            "A parameter that is used in several places gets the sum of their gradients.",
            "Look for a place that keeps a copy of the tensor, or whose part is reduced separately.",
        )
    module = first.name.rpartition(".")[0]
    more = case.describe_factor(first.factor) + case.describe_hooks(module, "Its module")
    note = f" ({first.note})" if first.note else ""
    return Finding(
        "PL707",
        module,
        f"All outputs agree, but the gradient of {name_some(names)} differs{note} {case.describe(differing)}."
        f"{more}",
        "A parameter's gradient does not depend on how its module is laid out.",
        _advise_on_parameters(case),
    )


def _advise_on_parameters(case: Case) -> str:
    if case.layout.ep > 1:
        copies = case.layout.dp // case.layout.ep_data
        return (
            f"Experts differ between the ranks of ep={case.layout.ep}, so nothing is summed or averaged over "
            f"these; their {copies} cop{'ies' if copies > 1 else 'y'} over the data ranks must be summed. "
            "Look for such a sum or factor, or for a hook on the parameter."
        )
    if case.layout.tp > 1 or case.layout.cp > 1:
        return (
            "A parameter that is whole on ranks which compute on parts needs its gradient summed over them; "
            "look for that sum, missing or done twice."
        )
    if case.layout.pp > 1:
        return (
            "A weight that several stages use gets the sum of their gradients, once per microbatch; look "
            "for a use that is missing there, or counted twice."
        )
    return "Look for a hook on the parameter, or for code that changes its gradient after backward."
