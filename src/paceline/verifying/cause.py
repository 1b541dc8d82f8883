"""Derives the likely cause from the differences, as one finding per layout.

Causes are tried in the order of a step: inputs, forward, loss, gradient, norm, update. The first difference
explains those after it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from paceline.finding import Finding
from paceline.phrases import name_some
from paceline.recipe.axes import list_axes
from paceline.verifying import gradient_cause
from paceline.verifying.case import Case, describe_settings, near, show_size
from paceline.verifying.closeness import Difference
from paceline.verifying.forward_cause import explain_forward, find_parent, find_place
from paceline.verifying.precision import LOSS
from paceline.verifying.run_steps import KINDS
from paceline.verifying.settings import FUNCTIONS, OPTIMIZER, PROCESS


def diagnose(case: Case) -> Finding:
    """Return the most likely fault of a layout."""
    found = _explain(case)
    when = f"step {case.step}" if case.step else "before step 1"
    where = f"{case.layout}, {when}" + (f", {found.where}" if found.where else "")
    return replace(found, where=where, saw=found.saw + _note_settings(case, found))


def starts_in(case: Case, modules: Mapping[str, str]) -> bool:
    """Return whether the first difference is in the code of one of `modules` (the loss may be one).

    Its inputs must agree, so only this code can have made the difference.
    """
    if not modules:
        return False
    forward, backward = case.events(gradient=False), case.events(gradient=True)
    if forward:
        return not forward[0].event.is_weight and find_place(case, forward[0])[0] in modules
    if case.of_kind("loss"):
        return LOSS in modules
    if backward:
        first = backward[0].event
        return first.module in modules or (first.side == "out" and find_parent(case, first.module) in modules)
    owners = {d.name.rpartition(".")[0] for d in case.of_kind("gradient")}
    return bool(owners) and owners <= set(modules)


def _note_settings(case: Case, found: Finding) -> str:
    """Return what else is known of ranks whose functions, process or optimizer settings differ."""
    others = [d for d in case.settings if d.owner in (FUNCTIONS, PROCESS, OPTIMIZER)]
    others = [d for d in others if d.name not in found.saw]
    return f" Besides, {describe_settings(case, others)}." if others else ""


def _explain(case: Case) -> Finding:
    """Return the cause; `where` is the full name of the module or tensor that has it."""
    if case.step > 0 and all(d.size <= d.rounding for d in case.first):
        return _explain_bits(case)
    if case.step == 0:
        return _explain_start(case)
    lost = _explain_lost(case)
    if lost is not None:
        return lost
    batch = _explain_batch(case)
    if batch is not None:
        return batch
    if case.events(gradient=False):
        return explain_forward(case)
    for explain in (
        _explain_loss,
        _explain_changed,
        gradient_cause.explain,
        _explain_norm,
        _explain_buffers,
        _explain_update,
    ):
        found = explain(case)
        if found is not None:
            return found
    raise AssertionError(f"no cause for {case.first[:3]}")


def _explain_bits(case: Case) -> Finding:
    first = min(case.first, key=lambda d: KINDS.index(d.kind))
    return Finding(
        "PL715",
        first.name,
        f"The {first.kind} differs {case.name_ranks([d.rank for d in case.first])} by {first.size:.1e}, "
        "which is rounding.",
        'reduction="exact" promises the bits of one process on every layout without '
        f"{' and '.join(list_axes(keeps_bits=False))}.",
        'Look for a sum whose order depends on the ranks, or train with reduction="fast", which promises '
        "the same numbers within rounding.",
    )


def _explain_start(case: Case) -> Finding:
    names = [d.name for d in case.first]
    first = max(case.first, key=lambda d: d.ratio)
    which = case.name_ranks(d.rank for d in case.first)
    return Finding(
        "PL700",
        first.name,
        f"Before the first step {name_some(names)} differ{'s' if len(set(names)) == 1 else ''} {which}, "
        f"by up to {first.size:.1e}{_note(first)}.",
        "Every layout starts from the same weights and buffers, to the bit.",
        "Look for random numbers that depend on the rank when the model is built, or a tensor that is not "
        "sent from rank 0.",
    )


def _explain_lost(case: Case) -> Finding | None:
    """Explain microbatches that no rank ran, or that several ranks ran."""
    if not case.observed:
        return None
    ran = Counter(number for observed in case.observed for number in observed.ran)
    lost = [number for number in range(case.num_microbatches) if not ran[number]]
    twice = [number for number, count in ran.items() if count > case.layout.num_ranks // case.layout.dp]
    if not lost and not twice:
        return None
    numbers = lost or twice
    what = "ran on no rank" if lost else "ran more than once"
    return Finding(
        "PL704",
        "the global batch",
        f"Microbatch {name_some(list(map(str, numbers)), 8)} of {case.num_microbatches} {what}.",
        "Each microbatch of the global batch runs exactly once.",
        "Check how the global batch is distributed, and the loop over a rank's microbatches.",
    )


def _explain_batch(case: Case) -> Finding | None:
    """Explain a batch that is not that of one process, whether the model gets that part of it or the loss."""
    apart: dict[str, set[int]] = {}
    numbers: set[str] = set()
    for observed in case.observed:
        for key, found in observed.batches.items():
            if case.watched.batches.get(key, found) != found:
                number, _, place = key.partition("/")
                apart.setdefault(place, set()).add(observed.rank)
                numbers.add(number)
    if not apart:
        return None
    what = f"batch{', batch'.join(sorted(apart))}" if "" not in apart else "The batch"
    return Finding(
        "PL716",
        "the batch",
        f"{what} differs {case.name_ranks(set().union(*apart.values()))} from one process, in microbatch "
        f"{name_some(sorted(numbers, key=int), 8)}.",
        "Every layout trains on the same global batches.",
        "Check the data: an order, an augmentation or a step that depends on the rank.",
    )


# ---- after the forward


def _explain_loss(case: Case) -> Finding | None:
    differing = case.of_kind("weight of the batch") or case.of_kind("loss")
    if not differing:
        return None
    first = differing[0]
    apart = _list_losses_apart(case)
    factor = f", {first.factor:.6g} times the reference's," if first.factor else ""
    if apart:
        saw = f"The result of the loss function for microbatch {name_some(list(map(str, apart)))} differs"
        rule = "The loss of a microbatch does not depend on the layout."
        fix = "Check the loss: a mean over a rank's part, or a missing sum over a split vocabulary."
    else:
        saw = f"Every microbatch's loss agrees, but the {first.kind}{factor} differs"
        rule = "The loss is the sum of all microbatches' losses over the sum of their weights."
        fix = "Check how losses and weights are summed over the ranks: means of means, or a missing rank."
    return Finding("PL718", "the loss", f"{saw} {case.describe(differing)}.", rule, fix)


def _list_losses_apart(case: Case) -> list[int]:
    apart = set()
    for observed in case.observed:
        for number, pair in observed.losses.items():
            expected = case.watched.losses.get(number, pair)
            if any(abs(a - b) > 1e-6 * max(abs(a), abs(b)) for a, b in zip(pair, expected, strict=True)):
                apart.add(number)
    return sorted(apart)


def _explain_changed(case: Case) -> Finding | None:
    """Explain weights that a forward changes in place."""
    changed = case.watched.changed
    differing = [d for d in case.first if d.kind in ("gradient", "weight") and d.name in changed]
    if not differing:
        return None
    first = differing[0]
    hooks = case.describe_hooks(first.name.rpartition(".")[0], "Its module")
    return Finding(
        "PL723",
        first.name,
        f"In one process a forward changes {first.name} in place, and outputs agree, but the {first.kind} "
        f"differs {case.describe(differing)}.{hooks}",
        "Weights change in the optimizer's step. A rank that gathers a weight for a forward, or keeps a "
        "part of it, loses what a forward writes to it.",
        "Change the weight after the step (for example after trainer.step), or compute what the forward "
        "needs without writing to it (torch.nn.utils.parametrize).",
    )


def _explain_norm(case: Case) -> Finding | None:
    differing = case.of_kind("norm")
    if not differing:
        return None
    return Finding(
        "PL708",
        "the global norm",
        f"Every gradient agrees, but the global norm differs {case.describe(differing)}."
        f"{case.describe_factor(differing[0].factor)}",
        "The norm is computed over all gradients, with each element counted once.",
        "Check how squares are summed: a shard's own norm is too small, and copies counted on every rank "
        "make it too large.",
    )


def _explain_buffers(case: Case) -> Finding | None:
    differing = [d for d in case.first if d.kind == "buffer"]
    if not differing or case.of_kind("weight"):
        return None
    first = differing[0]
    is_ordered = any(d.name in case.facts.ordered for d in differing)
    why = (
        " In one process too it depends on the order of the microbatches, by more than rounding: each "
        "forward continues from the state of the previous one."
        if is_ordered
        else ""
    )
    # On any rank: what one rank adds to statistics, all get.
    settings = [d for d in case.settings if d.owner == first.name.rpartition(".")[0]]
    why += f" Of its module, {describe_settings(case, settings)}." if settings else ""
    verb = "buffers" if len({d.name for d in differing}) > 1 else "buffer"
    return Finding(
        "PL710",
        first.name,
        f"Weights and gradients agree, but {verb} {name_some([d.name for d in differing])} "
        f"differ{'s' if verb == 'buffer' else ''} {case.describe(differing)}.{why}",
        "After each step, buffers must be the same on every rank and on every layout.",
        "A buffer that a forward changes must be synchronised; BatchNorm's statistics are merged over all "
        "microbatches. In a custom module, compute the buffer from values that all ranks share.",
    )


def _explain_update(case: Case) -> Finding | None:
    differing = case.of_kind("weight") or case.of_kind("optimizer")
    if not differing:
        return None
    first = differing[0]
    names = [d.name for d in differing]
    if first.kind == "weight" and set(names) <= case.tied:
        return Finding(
            "PL711",
            first.name,
            f"Gradients agree, but after the update only tied parameters differ ({name_some(names)}) "
            f"{case.describe(differing)}.",
            "Tied parameters are one tensor, updated once.",
            "Look for copies of the tensor that the optimizer updates separately.",
        )
    scaled = _find_clip(case)
    factor = "" if scaled is None else f" The optimizer saw gradients of {scaled:.4g} times their size."
    what = "weights" if first.kind == "weight" else "state of the optimizer"
    settings = [d for d in case.settings if d.owner == OPTIMIZER and d.name in names]
    if settings:
        factor += f" The optimizer's settings differ: {describe_settings(case, settings)}."
    return Finding(
        "PL709",
        first.name.split(" ")[0],
        f"Gradients and their norm agree, but the {what} after the update "
        f"differ{'s' if what[0] == 's' else ''} {case.name_ranks(d.rank for d in differing)}: "
        f"{name_some(names)}{_note(first)}, {show_size(first)}.{factor}",
        "The same gradients with the same clipping must change the weights in the same way.",
        "Check what follows the reduction: clipping by another norm, a missing step, weights gathered "
        "before the update, the optimizer's settings on this layout.",
    )


def _find_clip(case: Case) -> float | None:
    """Return the factor of the first moments, if the optimizer's state is compared at this step too."""
    factors = [
        d.factor
        for d in case.of_kind("optimizer")
        if d.name.endswith((" exp_avg", " momentum_buffer")) and d.factor is not None
    ]
    return factors[0] if factors and all(near(factor, factors[0]) for factor in factors) else None


def _note(difference: Difference) -> str:
    return f" ({difference.note})" if difference.note else ""
