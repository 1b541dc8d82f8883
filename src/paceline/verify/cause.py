"""From what differs to the likely cause, as one finding per layout.

The order is that of a step: what went in, forward, loss, gradient, norm, update. The first that differs
explains what comes after it.
"""

from __future__ import annotations

from collections import Counter

from paceline.finding import Finding
from paceline.verify import gradient_cause
from paceline.verify.case import Case, Explained, name_some, near, show_size
from paceline.verify.compare import Difference
from paceline.verify.locate import EventDifference
from paceline.verify.run_steps import KINDS

_CONTAINERS = {"ModuleList", "ModuleDict", "Sequential"}
# A difference of this share of a tensor's largest element is no rounding of any type in use.
_LARGE = 1e-3


def diagnose(case: Case) -> Finding:
    """What is most likely wrong with a layout."""
    found = _explain(case)
    when = f"step {case.step}" if case.step else "before step 1"
    where = f"{case.layout}, {when}" + (f", {found.module}" if found.module else "")
    return Finding(found.code, where, found.saw, found.rule, found.fix)


def _explain(case: Case) -> Explained:
    if case.step > 0 and all(d.size <= d.rounding for d in case.first):
        return _explain_bits(case)
    if case.step == 0:
        return _explain_start(case)
    lost = _explain_lost(case)
    if lost is not None:
        return lost
    if case.events(gradient=False):
        return _explain_forward(case)
    for explain in (_explain_loss, gradient_cause.explain, _explain_norm, _explain_buffers, _explain_update):
        found = explain(case)
        if found is not None:
            return found
    raise AssertionError(f"no cause for {case.first[:3]}")


def _explain_bits(case: Case) -> Explained:
    first = min(case.first, key=lambda d: KINDS.index(d.kind))
    return Explained(
        "PL715",
        first.name,
        f"The {first.kind} differs {case.name_ranks([d.rank for d in case.first])} by {first.size:.1e}, "
        "which is rounding.",
        'reduction="exact" promises the bits of one process on every layout without tp.',
        'Look for a sum whose order depends on the ranks; or train with reduction="fast", which promises '
        "rounding only.",
    )


def _explain_start(case: Case) -> Explained:
    names = [d.name for d in case.first]
    first = max(case.first, key=lambda d: d.ratio)
    which = case.name_ranks(d.rank for d in case.first)
    return Explained(
        "PL700",
        first.name,
        f"Before the first step {name_some(names)} differ{'s' if len(set(names)) == 1 else ''} {which}, "
        f"by up to {first.size:.1e}{_note(first)}.",
        "Every layout starts from the same weights and buffers, to the bit.",
        "Look for random numbers that depend on the rank when the model is built, or a tensor that is not "
        "handed out from rank 0.",
    )


def _explain_lost(case: Case) -> Explained | None:
    """Microbatches that no rank ran, or several did."""
    if not case.observed:
        return None
    ran = Counter(number for observed in case.observed for number in observed.ran)
    lost = [number for number in range(case.num_microbatches) if not ran[number]]
    twice = [number for number, count in ran.items() if count > case.layout.tp]
    if not lost and not twice:
        return None
    owner = {number: place for place in range(case.layout.dp) for number in case.owned(place)}
    numbers = lost or twice
    ranks = sorted({owner[number] * case.layout.tp for number in numbers})
    what = "ran on no rank" if lost else "ran more than once"
    return Explained(
        "PL704",
        "the global batch",
        f"Microbatch {name_some(list(map(str, numbers)), 8)} of {case.num_microbatches} {what}; "
        f"{'it belongs' if len(numbers) == 1 else 'they belong'} to rank {name_some(list(map(str, ranks)))}.",
        "Each microbatch of the global batch runs exactly once.",
        "Look at how the global batch is shared out, and at the loop over a rank's microbatches.",
    )


# ---- forward


def _explain_forward(case: Case) -> Explained:
    events = case.events(gradient=False)
    first = events[0]
    which = case.name_ranks(d.rank for d in events if d.order == first.order)
    micro = f"microbatch {first.microbatch}"
    module, place = _place(case, first)
    size = show_size(first.size, first.tolerance)
    if first.event.side == "in" and not first.event.module:
        return Explained(
            "PL716",
            "the batch",
            f"What went into the model differs {which}, {micro}, {size}.",
            "Every layout trains on the same global batches.",
            "Look at the data: an order, an augmentation or a step that depends on the rank.",
        )
    saw = f"The first difference {which} is {place}, {micro}, {size}."
    if first.owner is not None:
        saw += f" It is what rank {first.owner} of tp should have."
        return _explain_module(case, first, module, saw)
    facts = case.watched.modules.get(module) if case.watched is not None else None
    dropout = 0.0 if facts is None else facts.dropout
    if first.looks_masked or (dropout and not first.looks_rounded and first.size > _LARGE * first.scale):
        why = f" {facts.kind} has dropout {dropout:g}." if facts is not None and dropout else ""
        why += " Other elements are 0, and the rest agrees." if first.looks_masked else ""
        return Explained(
            "PL702",
            module,
            f"{saw}{why}",
            "Random numbers depend on seed, step, sample and position only, never on the rank or layout.",
            "Draw them through nn.Dropout or torch's functions, in the forward; a generator of your own must "
            "be seeded by what is computed.",
        )
    if first.only_padding:
        return Explained(
            "PL713",
            module,
            f"{saw} Only positions differ that the batch marks as padding.",
            "What stands in padding must not reach the loss, and should not differ either.",
            "Look for a statistic, a mask or a split that counts padding.",
        )
    if first.looks_rounded and case.dtype in ("fp64", "fp32"):
        return Explained(
            "PL712",
            module,
            f"{saw} It is what a 16-bit type rounds away.",
            f"dtype {case.dtype} computes and communicates in that type throughout.",
            "Look for a cast to bf16 or fp16, or an autocast, that the layout brings.",
        )
    if first.factor is not None and not near(first.factor, 1.0, 1e-6):
        axis = case.name_degree(first.factor) or (
            case.name_degree(1 / first.factor) if first.factor else None
        )
        saw += f" It is {first.factor:.6g} times the reference's" + (f": {axis}." if axis else ".")
    return _explain_module(case, first, module, saw)


def _explain_module(case: Case, first: EventDifference, module: str, saw: str) -> Explained:
    facts = case.watched.modules.get(module) if case.watched is not None else None
    if case.step > 1 and facts is not None and facts.has_parameters and first.event.side == "out":
        return Explained(
            "PL714",
            module,
            f"{saw} Its input agrees, the steps before agree, and so do its weights after them.",
            "A forward uses the weights that the last update left.",
            "Look for weights that are kept from before: gathered once and not again, or a copy.",
        )
    return Explained(
        "PL701",
        module,
        saw,
        "A module gives the same output under every layout.",
        "Look at how this module is laid out: a sum over tp after a matrix product that was split by rows, "
        "heads or vocabulary divided in another way than its weights, a copy that went its own way.",
    )


def _place(case: Case, first: EventDifference) -> tuple[str, str]:
    """The module that a forward difference is put to, and where in it."""
    event = first.event
    if event.side == "out":
        return event.module, f"in the output of {event.module or 'the model'}"
    parent = event.module.rpartition(".")[0]
    modules = case.watched.modules if case.watched is not None else {}
    while parent and parent in modules and modules[parent].kind in _CONTAINERS:
        parent = parent.rpartition(".")[0]
    before = _find_earlier(case, first.order, parent)
    between = f" after {before} and" if before else ""
    return parent, f"in the code of {parent or 'the model itself'},{between} before {event.module}"


def _find_earlier(case: Case, order: int, parent: str) -> str:
    """The last child of a module that came out before an event."""
    if case.watched is None:
        return ""
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


# ---- after the forward


def _explain_loss(case: Case) -> Explained | None:
    differing = case.of_kind("weight of the batch") or case.of_kind("loss")
    if not differing:
        return None
    first = differing[0]
    which = case.name_ranks(d.rank for d in differing)
    apart = _list_losses_apart(case)
    factor = f", {first.factor:.6g} times the reference's," if first.factor else ""
    if apart:
        saw = f"What the loss function gives for microbatch {name_some(list(map(str, apart)))} differs"
        rule = "The loss of a microbatch doesn't depend on the layout."
        fix = "Look at the loss: a mean over what a rank has, or a sum over a split vocabulary left out."
    else:
        saw = f"Every microbatch's loss agrees, but the {first.kind}{factor} differs"
        rule = "The loss is the sum of all microbatches' losses over the sum of their weights."
        fix = (
            "Look at how losses and weights are added up over the ranks: means of means, or a rank left out."
        )
    return Explained(
        "PL718", "the loss", f"{saw} {which}, {show_size(first.size, first.tolerance)}.", rule, fix
    )


def _list_losses_apart(case: Case) -> list[int]:
    if case.watched is None:
        return []
    apart = set()
    for observed in case.observed:
        for number, pair in observed.losses.items():
            expected = case.watched.losses.get(number, pair)
            if any(abs(a - b) > 1e-6 * max(abs(a), abs(b)) for a, b in zip(pair, expected, strict=True)):
                apart.add(number)
    return sorted(apart)


def _explain_norm(case: Case) -> Explained | None:
    differing = case.of_kind("norm")
    if not differing:
        return None
    first = differing[0]
    times = f" It is {first.factor:.6g} times the reference's." if first.factor else ""
    return Explained(
        "PL708",
        "the global norm",
        f"Every gradient agrees, but the global norm differs {case.name_ranks(d.rank for d in differing)}, "
        f"{show_size(first.size, first.tolerance)}.{times}",
        "The norm is over all gradients, each element once, wherever it lies.",
        "Look at how squares are summed: a shard's own norm is too small, and copies counted on every rank "
        "make it too large.",
    )


def _explain_buffers(case: Case) -> Explained | None:
    differing = [d for d in case.first if d.kind == "buffer"]
    if not differing or case.of_kind("weight"):
        return None
    first = differing[0]
    verb = "buffers" if len({d.name for d in differing}) > 1 else "buffer"
    return Explained(
        "PL710",
        first.name,
        f"Weights and gradients agree, but {verb} {name_some([d.name for d in differing])} "
        f"differ{'s' if verb == 'buffer' else ''} {case.name_ranks(d.rank for d in differing)}, "
        f"{show_size(first.size, first.tolerance)}.",
        "Buffers are the same on every rank and on every layout after each step.",
        "A buffer that a forward changes has to be synchronised; BatchNorm's statistics are merged over all "
        "microbatches. For a module of your own, compute it from what all ranks share.",
    )


def _explain_update(case: Case) -> Explained | None:
    differing = case.of_kind("weight") or case.of_kind("optimizer")
    if not differing:
        return None
    first = differing[0]
    names = [d.name for d in differing]
    which = case.name_ranks(d.rank for d in differing)
    tied = {name for group in case.facts.tied for name in group}
    if tied and first.kind == "weight" and set(names) <= tied:
        return Explained(
            "PL711",
            first.name,
            f"Gradients agree, but after the update only tied parameters differ ({name_some(names)}) "
            f"{which}, {show_size(first.size, first.tolerance)}.",
            "Tied parameters are one tensor, updated once.",
            "Look for a layout that made copies of it, which the optimizer updates apart.",
        )
    scaled = _find_clip(case)
    factor = "" if scaled is None else f" The optimizer saw gradients of {scaled:.4g} times their size."
    what = "weights" if first.kind == "weight" else "state of the optimizer"
    return Explained(
        "PL709",
        first.name.split(" ")[0],
        f"Gradients and their norm agree, but the {what} after the update "
        f"differ{'s' if what[0] == 's' else ''} {which}: {name_some(names)}{_note(first)}, "
        f"{show_size(first.size, first.tolerance)}.{factor}",
        "The same gradients, clipped alike, move the weights alike.",
        "Look at what comes after the reduction: clipping by another norm, a step left out, weights gathered "
        "from before the update, the optimizer's settings on this layout.",
    )


def _find_clip(case: Case) -> float | None:
    """The factor of the first moments, where the optimizer's state is compared at this step too."""
    factors = [
        d.factor
        for d in case.of_kind("optimizer")
        if d.name.endswith((" exp_avg", " momentum_buffer")) and d.factor is not None
    ]
    return factors[0] if factors and all(near(factor, factors[0]) for factor in factors) else None


def _note(difference: Difference) -> str:
    return f" ({difference.note})" if difference.note else ""
