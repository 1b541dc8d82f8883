"""Explains why gradients differ although every module's output agrees.

A gradient is a sum over microbatches. If least squares find the factor with which each of them entered the
sum, the factors show the cause. If no factors explain the difference, backward went wrong inside a module.
"""

from __future__ import annotations

from paceline.phrases import name_ranks, name_some
from paceline.recipe.axes import list_axes
from paceline.verifying.case import Case, Explained, near, show_size
from paceline.verifying.forward_cause import explain_settings, find_parent
from paceline.verifying.settings import FUNCTIONS, OPTIMIZER

# The place of causes that belong to the reduction and to no module.
_PLACE = "the sum of gradients"
# A share of all gradients; if fewer differ, one module may be the cause.
_NEARLY_ALL = 0.8
_SUM_RULE = "The gradient is the sum over all microbatches of the global batch, each of them once."


def explain(case: Case) -> Explained | None:
    """Return the cause of differing gradients; `None` if they agree."""
    differing = case.of_kind("gradient")
    if not differing:
        return None
    for each in (
        _explain_absent,
        _explain_rounding,
        _explain_partial,
        _explain_factors,
        _explain_moved,
    ):
        found = each(case)
        if found is not None:
            return found
    events = case.events(gradient=True)
    if events:
        return _explain_backward(case)
    return _explain_strange(case) or _explain_parameters(case)


def _explain_partial(case: Case) -> Explained | None:
    """Explain gradients that each rank of an axis computes in part: the sum over it is missing, or wrong."""
    names = {d.name for d in case.of_kind("gradient")}
    if case.events(gradient=True):
        return None
    degrees = case.layout.degrees
    for axis in {axis for observed in case.observed for axis in observed.partial}:
        over = f"{axis}={degrees[axis]}"
        place, many = f"the sum of gradients over {axis}", name_some(sorted(names))
        which = case.name_ranks(d.rank for d in case.of_kind("gradient"))
        rule = (
            f"Each rank of {axis} computes with some positions or heads, and so gets an addend of these "
            "parameters' gradients. They are summed over it once per step."
        )
        factors = [d.factor for d in case.of_kind("gradient")]
        partial = {name for observed in case.observed for name in observed.partial.get(axis, ())}
        if names <= partial and None not in factors:
            for wanted, how in ((degrees[axis], "summed over it again"), (1 / degrees[axis], "averaged")):
                if all(factor is not None and near(factor, wanted) for factor in factors):
                    return Explained(
                        "PL703",
                        place,
                        f"All outputs agree, but the gradient of {many} is {wanted:.4g} times the "
                        f"reference's {which}: with {over} that is {how}. No other parameter's differs.",
                        rule,
                        f"Look for a second sum, or a mean, over {axis}.",
                    )
        if names <= {name for observed in case.observed for name in observed.addends.get(axis, ())}:
            return Explained(
                "PL705",
                place,
                f"All outputs agree, but the gradient of {many} is only this rank's addend {which}: the sum "
                f"of all ranks' over {over} is right.",
                rule,
                f"Look for the missing sum over {axis}, or for a gradient that is set after it.",
            )
    return None


def _explain_strange(case: Case) -> Explained | None:
    """Explain that nearly all gradients differ though every module's is right: by a foreign addend."""
    differing = {d.name for d in case.of_kind("gradient")}
    known = [] if case.watched is None else case.watched.parameters
    is_tied = differing <= {name for group in case.facts.tied for name in group}
    if is_tied or not known or len(differing) < _NEARLY_ALL * len(known):
        return None
    first = case.of_kind("gradient")[0]
    return Explained(
        "PL703",
        _PLACE,
        f"All outputs and, in every module, their gradients agree, but the gradient of {len(differing)} "
        f"parameters differs {case.name_ranks(d.rank for d in case.of_kind('gradient'))}, "
        f"{show_size(first.size, first.tolerance)}, and is no sum of the microbatches' gradients.",
        _SUM_RULE,
        "Look for anything added besides the microbatches: an idle round of a rank without microbatches, a "
        "rest of the previous step, another rank's part.",
    )


def _explain_rounding(case: Case) -> Explained | None:
    """Explain gradients that a narrower type has rounded."""
    differing = case.of_kind("gradient")
    rounded = [d for d in differing if d.rounded_to]
    computed = "" if case.events(gradient=True) else case.narrower(None)
    if case.dtype not in ("fp64", "fp32") or (not computed and len(rounded) < 0.8 * len(differing)):
        return None
    kind = rounded[0].rounded_to if rounded else computed
    names = name_some([d.name for d in rounded or differing])
    why = f"rounded to {kind}" if rounded else f"others, and this layout computes in {kind} behind backward"
    return Explained(
        "PL712",
        _PLACE,
        f"All outputs agree, but {len(rounded or differing)} of {len(differing)} gradients that differ, "
        f"{names}, are {why}, {case.name_ranks(d.rank for d in rounded or differing)}.",
        f"dtype {case.dtype} computes and communicates in that type throughout.",
        f"Look for a reduction that sends {kind}, or a shard's reduce_dtype.",
    )


def _explain_absent(case: Case) -> Explained | None:
    """Explain parameters that the optimizer of a rank does not have."""
    names = {d.name for d in case.of_kind("gradient")} | {d.name for d in case.of_kind("weight")}
    absent = [d for d in case.settings if d.owner == OPTIMIZER and not d.found and d.name in names]
    if not absent:
        return None
    return Explained(
        "PL709",
        absent[0].name,
        f"All outputs agree, but the optimizer does not have {name_some([d.name for d in absent])} "
        f"{case.name_ranks(d.rank for d in absent)}.",
        "Every rank's optimizer has the same parameters, in the same groups.",
        "Check the function that builds the optimizer: its choice of parameters may depend on the rank.",
    )


def _explain_moved(case: Case) -> Explained | None:
    """Explain a factor that is nearly 1 and accounts for the whole difference."""
    found = {o.rank: o.moved for o in case.observed if o.moved is not None}
    # Only the ranks of tp at one place have the same microbatches; all others must have the same sum.
    if not found or len(found) < case.layout.num_ranks:
        return None
    rank = min(found)
    moved = found[rank]
    scale = max(map(abs, moved))
    by_place = [[moved[number] for number in case.owned(place)] for place in range(case.layout.dp)]
    shown = ", ".join(f"1{each[0]:+.2g}" for each in by_place if each)
    if any(abs(a - each[0]) > 1e-2 * scale for each in by_place if each for a in each):
        return None
    which = case.name_ranks(found)
    if all(abs(each[0] - moved[0]) <= 1e-2 * scale for each in by_place if each):
        return Explained(
            "PL703",
            _PLACE,
            f"Outputs agree, but the gradient {which} is 1{moved[0]:+.2g} times the reference's.",
            _SUM_RULE,
            "Look for code that scales all gradients between backward and the optimizer.",
        )
    return Explained(
        "PL706",
        _PLACE,
        f"Outputs agree, but in the gradient {which} each rank's part has a different factor: {shown}.",
        "Gradients must be clipped, scaled and normalised after they are summed, by numbers that ranks "
        "share.",
        "Look for code that scales a rank's gradient before or in the reduction.",
    )


def _explain_factors(case: Case) -> Explained | None:
    found = {observed.rank: observed.factors for observed in case.observed if observed.factors is not None}
    wrong = {rank: f for rank, f in found.items() if not all(near(factor, 1.0) for factor in f)}
    if not wrong:
        return None
    which = case.name_ranks(wrong)
    rank = min(wrong)
    factors = wrong[rank]
    for explain in (
        _explain_replicas,
        _explain_unreduced,
        _explain_missing,
        _explain_common,
        _explain_weights,
        _explain_last,
    ):
        explained = explain(case, rank, factors, which)
        if explained is not None:
            return explained
    shown = ", ".join(f"{factor:.4g}" for factor in factors[:16])
    return Explained(
        "PL703",
        _PLACE,
        f"Outputs agree, but the gradient {which} is a sum with factors {shown} over the microbatches.",
        _SUM_RULE,
        "Look for code that scales gradients between backward and the optimizer.",
    )


def _explain_replicas(case: Case, rank: int, factors: list[float], which: str) -> Explained | None:
    """Explain a replica whose gradient has its own microbatches and no other replica's."""
    layout = case.layout
    within = list_axes(divides_model=True)
    replica = next(ranks for ranks in layout.list_groups(within) if rank in ranks)
    own = {number for member in replica for number in case.owned(layout.find_dp_rank(member))}
    present = {number for number, factor in enumerate(factors) if not near(factor, 0.0, 5.0)}
    if layout.dp_shard == 1 or layout.dp == layout.dp_shard or not own or present != own:
        return None
    return Explained(
        "PL705",
        _PLACE,
        f"Outputs agree, but the gradient {which} has the microbatches of the rank's own replica and no "
        "other's.",
        "The shards' sums are summed over dp_replicate, once per step.",
        "Check the all-reduce over dp_replicate after the reduce-scatter over dp_shard.",
    )


def _explain_unreduced(case: Case, rank: int, factors: list[float], which: str) -> Explained | None:
    """Explain a rank whose gradient has its own microbatches and none of the others'."""
    own = set(case.owned(case.layout.find_dp_rank(rank)))
    others = set(range(len(factors))) - own
    if not own or not others or any(not near(factors[number], 0.0, 5.0) for number in others):
        return None
    if any(near(factors[number], 0.0, 5.0) for number in own):
        return None
    for observed in case.observed:  # a rank that lacks its own too has the same sum as the others
        theirs = case.owned(case.layout.find_dp_rank(observed.rank))
        lost = [] if observed.factors is None else [near(observed.factors[n], 0.0, 5.0) for n in theirs]
        if lost and all(lost):
            return None
    scale = factors[min(own)]
    over_tp = case.layout.tp > 1 and near(scale, case.layout.tp)
    instead = f" Its own are summed over tp={case.layout.tp} instead of dp." if over_tp else ""
    return Explained(
        "PL705",
        _PLACE,
        f"Outputs agree, but the gradient {which} has this rank's own microbatches and no other rank's "
        f"(factor {scale:.4g} for its own, 0 for the others).{instead}",
        "Every rank applies the sum over all ranks.",
        "Look for a missing reduction on these ranks: no_sync around the last backward, a hook that returns "
        "the bucket unchanged, a group that is not the layout's.",
    )


def _explain_missing(case: Case, rank: int, factors: list[float], which: str) -> Explained | None:
    """Explain microbatches that entered the sum with factor 0, on every rank that differs."""
    zeros = [number for number, factor in enumerate(factors) if near(factor, 0.0, 5.0)]
    if not zeros:
        return None
    for place in range(case.layout.dp):
        if case.owned(place) and zeros == list(case.owned(place)):
            members = case.layout.list_dp_ranks(place)
            is_run = members[-1] - members[0] == len(members) - 1 > 0
            ranks = f"ranks {members[0]} to {members[-1]}" if is_run else name_ranks(members)
            return Explained(
                "PL705",
                _PLACE,
                f"Outputs agree, but the gradient {which} has no contribution of the microbatches of "
                f"{ranks}.",
                "Every rank's gradient must be part of the sum.",
                f"Check what {ranks} passes to the reduction: a gradient set to zero, or another bucket.",
            )
    return Explained(
        "PL704",
        _PLACE,
        f"Outputs agree, but the gradient {which} has nothing of microbatch "
        f"{name_some(list(map(str, zeros)), 8)}.",
        _SUM_RULE,
        "Look for a gradient that is overwritten instead of added to, or reset between microbatches.",
    )


def _explain_common(case: Case, rank: int, factors: list[float], which: str) -> Explained | None:
    """Explain one factor for all microbatches."""
    factor = factors[0]
    if not all(near(other, factor) for other in factors):
        return None
    summed, divided = case.name_degree(factor), case.name_degree(1 / factor) if factor else None
    if summed is not None:
        saw = f"the gradient {which} is {factor:.4g} times the reference's: summed over {summed} again."
        fix = "Look for a second sum over that axis, or a mean that should follow the sum and does not."
    elif divided is not None:
        saw = (
            f"the gradient {which} is 1/{1 / factor:.4g} of the reference's: averaged over {divided} as well."
        )
        fix = "Look for a mean over that axis in addition to the division by the weight of the global batch."
    else:
        saw = f"the gradient {which} is {factor:.6g} times the reference's."
        fix = "Look for code that scales all gradients: clipping before the reduction, a loss scale."
        if case.layout.pp > 1:
            fix = "Look for code that scales all gradients of a stage, or for a backward that runs twice."
    return Explained("PL703", _PLACE, f"Outputs agree, but {saw}", _SUM_RULE, fix)


def _explain_weights(case: Case, rank: int, factors: list[float], which: str) -> Explained | None:
    """Explain a factor per rank or microbatch: a mean of means if weights show it, else a clip per rank."""
    assert case.watched is not None
    weights = [case.watched.losses.get(number, (0.0, 1.0))[1] for number in range(len(factors))]
    if len(set(weights)) > 1 and _all_near([f * w for f, w in zip(factors, weights, strict=True)]):
        return _mean_of_means(which, "microbatches", factors)
    places = [case.owned(place) for place in range(case.layout.dp) if case.owned(place)]
    if len(places) < 2 or not all(_all_near([factors[number] for number in owned]) for owned in places):
        return None
    by_place = [factors[owned[0]] for owned in places]
    sums = [sum(weights[number] for number in owned) for owned in places]
    if len(set(sums)) > 1 and _all_near([f * w for f, w in zip(by_place, sums, strict=True)]):
        return _mean_of_means(which, "ranks", by_place)
    shown = ", ".join(f"{factor:.4g}" for factor in by_place)
    return Explained(
        "PL706",
        _PLACE,
        f"Outputs agree, but in the gradient {which} each rank's part has a different factor: {shown}.",
        "Gradients must be clipped, scaled and normalised after they are summed, by numbers that ranks "
        "share.",
        "Look for clipping (or a division by a norm, a count, a loss scale) before the reduction.",
    )


def _mean_of_means(which: str, what: str, factors: list[float]) -> Explained:
    shown = ", ".join(f"{factor:.4g}" for factor in factors[:8])
    return Explained(
        "PL706",
        _PLACE,
        f"Outputs agree, but the gradient {which} is the mean of the {what}' means: their factors ({shown}) "
        "are one over their weights.",
        "The loss is the sum of all losses divided by the sum of all weights; parts with fewer targets "
        "count less.",
        "Sum losses and weights over the global batch first, and divide once.",
    )


def _explain_last(case: Case, rank: int, factors: list[float], which: str) -> Explained | None:
    """Explain that only the last microbatch of a rank entered the sum correctly, or only it did not."""
    places = [case.owned(place) for place in range(case.layout.dp) if case.owned(place)]
    last = {owned[-1] for owned in places}
    earlier = set(range(len(factors))) - last
    if not earlier:
        return None
    right = {number for number, factor in enumerate(factors) if near(factor, 1.0)}
    if right not in (last, earlier):
        return None
    part = "the last microbatch of each rank" if right == last else "all microbatches but each rank's last"
    value = factors[min(earlier if right == last else last)]
    return Explained(
        "PL704",
        _PLACE,
        f"Outputs agree, but in the gradient {which} only {part} has the right factor (the others have "
        f"{value:.4g}): accumulation works differently.",
        _SUM_RULE,
        "Check what is kept between the microbatches of a step: a gradient that is reduced more than once, "
        "or overwritten.",
    )


def _all_near(values: list[float]) -> bool:
    return all(near(value, values[0]) for value in values)


def _explain_backward(case: Case) -> Explained:
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
    factor = ""
    if first.factor is not None and not near(first.factor, 1.0):
        axis = case.name_degree(first.factor) or (
            case.name_degree(1 / first.factor) if first.factor else None
        )
        factor = f" It is {first.factor:.4g} times the reference's" + (f" ({axis})." if axis else ".")
    ranks = {d.rank for d in same}
    if case.settings_of(module, ranks) or case.settings_of(FUNCTIONS, ranks):
        saw = f"All outputs agree; in backward {saw}, {show_size(first.size, first.tolerance)}."
        found = explain_settings(case, first, module, saw, ranks)
        assert found is not None
        return found
    factor += _list_apart(case, find_parent(case, module))
    facts = None if case.watched is None else case.watched.modules.get(module)
    if facts is not None and facts.hooks:
        factor += f" It has hooks that are not Paceline's: {', '.join(facts.hooks[:3])}."
    return Explained(
        "PL707",
        module,
        f"All outputs agree; in backward {saw}, microbatch {first.microbatch}, "
        f"{show_size(first.size, first.tolerance)}.{factor} All gradients behind it agree.",
        "Backward through a module gives the same gradients under every layout.",
        "Check the backward of what follows this place: "
        + ("a missing or duplicate sum over tp, " if case.layout.tp > 1 else "")
        + ("rows or heads that an exchange over cp loses or repeats, " if case.layout.cp > 1 else "")
        + ("a gradient that is lost or doubled between stages, " if case.layout.pp > 1 else "")
        + "a hook or a custom backward, a tensor changed in place.",
    )


def _list_apart(case: Case, parent: str) -> str:
    """Return a sentence on the parameters of a module that alone have another gradient; empty for none.

    Several children share the gradient of their common input; it shows which of them it came through.
    """
    own = [] if case.watched is None else [n for n in case.watched.parameters if n.startswith(f"{parent}.")]
    differing = {d.name for d in case.of_kind("gradient")}
    apart = [name for name in own if name in differing]
    if not parent or not apart or len(apart) == len(own):
        return ""
    return f" Of the parameters in {parent}, only {name_some(apart)} has a different gradient."


def _explain_parameters(case: Case) -> Explained:
    """Explain that all outputs and their gradients agree, but the gradients of some parameters do not."""
    differing = case.of_kind("gradient")
    names = [d.name for d in differing]
    which = case.name_ranks(d.rank for d in differing)
    tied = {name for group in case.facts.tied for name in group}
    first = differing[0]
    if tied and set(names) <= tied:
        return Explained(
            "PL711",
            first.name,
            f"Only the gradients of tied parameters differ ({name_some(names)}) {which}, "
            f"{show_size(first.size, first.tolerance)}.",
            "A parameter that is used in several places gets the sum of their gradients.",
            "Look for a place that keeps a copy of the tensor, or whose part is reduced separately.",
        )
    factor = first.factor
    scaled = f" It is {factor:.4g} times the reference's." if factor and not near(factor, 1.0) else ""
    note = f" ({first.note})" if first.note else ""
    facts = None if case.watched is None else case.watched.modules.get(first.name.rpartition(".")[0])
    if facts is not None and facts.hooks:
        scaled += f" Its module has hooks that are not Paceline's: {', '.join(facts.hooks[:3])}."
    return Explained(
        "PL707",
        first.name.rpartition(".")[0],
        f"All outputs agree, but the gradient of {name_some(names)} differs {which}{note}, "
        f"{show_size(first.size, first.tolerance)}.{scaled}",
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
