"""Rules on wrapping a model, backward, clipping and the optimizer's step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from paceline.lint.rules.rule import Spot, WitnessTrace, at, is_averaged, name_of, rule, trains
from paceline.lint.trace import BranchItem, CallItem, Item, LoopItem, TraceEvent, events
from paceline.lint.values import Taint, Value

_MODELS = ("model", "ddp", "fsdp")


def _models(optimizer: Value) -> set[Value]:
    """Return the models and wrappers whose parameters an optimizer has."""
    found = {dep for dep in optimizer.deps if dep.kind in _MODELS}
    models = [dep for dep in optimizer.deps if dep.kind == "model"]
    found |= {dep.fact("wrapped") for dep in models if dep.fact("wrapped") is not None}
    for dep in list(found):
        if dep.kind in ("ddp", "fsdp"):
            found |= set(dep.attrs["module"].alternatives())
    return found


def _changes_weights(event: TraceEvent) -> bool:
    return event.kind == "step" and event.what != "scheduler"


def _updates(found: Iterable[TraceEvent]) -> list[TraceEvent]:
    """Return the steps of known optimizers."""
    return [event for event in found if _changes_weights(event) and event.target.kind == "optimizer"]


def _parts(model: Value, depth: int = 4) -> set[Value]:
    """Return a model with the modules in it."""
    inner = [part for part in model.attrs.values() if isinstance(part, Value) and part.kind in _MODELS]
    return {model}.union(*(_parts(part, depth - 1) for part in inner if depth))


def _may_clear(event: TraceEvent, models: set[Value]) -> bool:
    """Return whether gradients of some models are cleared, as far as is known."""
    for one in event.target.alternatives() if event.kind == "clear" else ():
        own = {part for part in (one, *one.deps) if part.kind in _MODELS}
        own = _models(one) if one.kind == "optimizer" else own
        if not own or one.fact("escaped") or set[Value]().union(*map(_parts, own)) & models:
            return True
    return False


@rule("PL030")
def no_zero_grad(witness: WitnessTrace) -> Iterator[Spot]:
    """Report a loop with backward and step in which nothing clears the gradients."""
    seen: set[int] = set()
    for loop, found in sorted(witness.rounds, key=lambda pair: len(pair[1])):
        backwards = [event for event in found if event.kind == "backward"]
        for step in _updates(found) if backwards else ():
            target, models = step.target, _models(step.target)
            if id(step.node) in seen:
                continue
            if any(_may_clear(event, models) for event in found):
                seen.add(id(step.node))
                continue
            if target.ref is not None or step.has_closure:
                continue
            if any(one.fact("escaped") for one in (target, *models)) or loop.count in (0, 1):
                continue
            if any(models & set(event.deps) for event in backwards):
                seen.add(id(step.node))
                saw = f"`{name_of(step.node)}` uses gradients of all rounds: this loop never clears them."
                yield at(step, saw)


def _windows(items: Sequence[Item]) -> Iterator[tuple[BranchItem | LoopItem, int]]:
    """Yield the branches that are taken once in some rounds and the inner loops, with their rounds."""
    for item in items:
        if isinstance(item, BranchItem):
            size = item.condition.fact("window") if item.condition is not None else None
            if isinstance(size, int) and size > 1:
                yield item, size
            for arm in item.arms:
                yield from _windows(arm)
        elif isinstance(item, CallItem):
            yield from _windows(item.body)
        elif isinstance(item, LoopItem) and (item.count or 0) > 1:
            yield item, item.count or 0


def _accumulating(witness: WitnessTrace) -> Iterator[tuple[TraceEvent, int, list[TraceEvent] | None]]:
    """Yield backwards of rounds of which only some end with a step, with their number.

    The events of the loop are given where the window is a branch: the rounds of an inner loop may be tasks.
    """
    for loop, found in witness.rounds:
        for item, size in _windows(loop.body):
            inside = list(events([item], "step", "backward", "clear"))
            outside = [event for event in found if event not in inside]
            is_branch = isinstance(item, BranchItem)
            ends, rounds = (inside, outside) if is_branch else (outside, inside)
            if any(_changes_weights(event) or (event.kind == "clear" and not is_branch) for event in rounds):
                continue
            models = set[Value]().union(*(_models(step.target) for step in _updates(ends)))
            backwards = [event for event in rounds if event.kind == "backward"]
            for event in backwards if is_branch or len(backwards) == 1 else ():
                if models & set(event.deps):
                    yield event, size, found if is_branch else None


@rule("PL031", "warning")
def loss_not_divided(witness: WitnessTrace) -> Iterator[Spot]:
    """Report mean losses that are accumulated and not divided by the number of rounds."""
    for event, size, found in _accumulating(witness):
        if event.is_mean and found is not None and not any(one.kind == "grad" for one in found):
            saw = f"gradients of {size} mean losses are added, and the loss is not divided by {size}."
            yield at(event, saw)


@rule("PL032", "warning")
def accumulation_without_no_sync(witness: WitnessTrace) -> Iterator[Spot]:
    """Report rounds of accumulation that all reduce gradients."""
    for event, size, _ in _accumulating(witness):
        ((model, quiet), *others) = event.quiet.items() or [(None, None)]
        if quiet is False and not others and model.kind == "ddp" and not model.fact("own_sync"):
            yield at(event, f"each of {size} backwards per step sums the gradients over ranks; one would do.")


@rule("PL033")
def step_without_exchange(witness: WitnessTrace) -> Iterator[Spot]:
    """Report a step whose backwards were all under no_sync."""
    if any(witness.events("grad")):
        return
    for _, found in witness.rounds:
        backwards = [event for event in found if event.kind == "backward"]
        if any(event.kind == "coll" for event in found):
            continue
        for step in _updates(found):
            mine = [event for event in backwards if _models(step.target) & set(event.deps)]
            wrapped = [event for event in mine if event.quiet]
            is_quiet = all(all(event.quiet.values()) for event in wrapped)
            if wrapped and is_quiet and len(wrapped) == len(backwards):
                saw = "every backward before this step is under no_sync(): ranks step by their own gradients."
                yield at(step, saw)


@rule("PL034")
def clip_before_unscale(witness: WitnessTrace) -> Iterator[Spot]:
    """Report clipping of gradients that are still scaled."""
    found: list[Spot] = []
    _clips(witness.items, None, found)
    return iter(found)


@rule("PL035")
def clip_of_shards(witness: WitnessTrace) -> Iterator[Spot]:
    """Report a norm over the gradients of this rank's shards, by which each rank clips its own."""
    for event in witness.events("clip"):
        if event.is_norm and any(dep.kind == "fsdp" and not dep.fact("is_whole") for dep in event.deps):
            yield at(event, "each rank takes the norm of its own shards for that of the model.")


def _summed_by_hand(witness: WitnessTrace) -> Iterator[tuple[TraceEvent, set[Value]]]:
    """Yield the sums of gradients over ranks that the script calls itself, with the models."""
    for _, found in witness.rounds:
        sums = [
            event
            for event in found
            if event.kind == "coll" and event.op == "all_reduce" and event.group is None
            if event.out is not None and event.out.fact("grad")
        ]
        means = {dep for event in found if event.kind == "backward" and event.is_mean for dep in event.deps}
        for step in found if sums else ():
            models = _models(step.target) & means if _changes_weights(step) else set()
            facts = [fact for one in models for fact in (one.fact("wrapped"), one.fact("sharded"))]
            if models and not any(facts) and all(model.kind == "model" for model in models):
                yield from ((event, models) for event in sums if models & event.out.deps)


@rule("PL036")
def sum_for_mean(witness: WitnessTrace) -> Iterator[Spot]:
    """Report gradients of mean losses that are summed over ranks and never divided."""
    if any(witness.events("grad", "scaled")):
        return
    for event, _ in _summed_by_hand(witness):
        op = event.reduce_op
        if op is None or (op.kind == "lib" and op.ref.endswith(".SUM")):
            yield at(
                event, "gradients are summed over ranks, and nothing divides them by the number of ranks."
            )


@rule("PL826")
def unlike_starts(witness: WitnessTrace) -> Iterator[Spot]:
    """Report a model that each rank draws by itself, if ranks then apply the same gradients to it."""
    if any(event.op.startswith("broadcast") or event.via for event in witness.events("coll")):
        return
    loaded = {one for event in witness.events("load_state") for one in event.model.alternatives()}
    for step, models in _summed_by_hand(witness):
        for model in models - loaded:
            others = [one for one in witness.events("coll") if one.out is not None and model in one.out.deps]
            is_drawn = any(part.fact("drawn") for part in _parts(model))
            if is_drawn and not model.fact("escaped") and all(one.out.fact("grad") for one in others):
                saw = "ranks draw different weights here, and then apply the same gradients to them."
                assert model.node is not None
                yield Spot(model.node, step.path, saw)


@rule("PL038")
def backward_of_a_mean(witness: WitnessTrace) -> Iterator[Spot]:
    """Report the backward of a loss that all_reduce and a division have made a mean."""
    for event in witness.events("backward"):
        if event.is_averaged and any(map(is_averaged, event.quiet)):
            saw = (
                "all_reduce has no gradient, so dividing by the number of ranks scales it, and DDP does too."
            )
            yield at(event, saw)


@rule("PL061", "warning")
def waits_in_each_round(witness: WitnessTrace) -> Iterator[Spot]:
    """Report a rank that waits for its device or the others in each round beside the sum of gradients."""
    # A loop with a clock that trains nothing: the rounds that a generator gives, measured there.
    measured = ({event.kind for event in found} for _, found in witness.rounds)
    if any(event.is_timer for event in witness.events("clock")) or any(
        "clock" in kinds and "backward" not in kinds for kinds in measured
    ):
        return
    for loop, found in witness.rounds:
        straight = list(_straight(loop.body))
        if any(event.kind in ("clock", "save", "load") for event in found):
            continue
        if any(event.kind == "backward" and False in event.quiet.values() for event in straight):
            for event in straight:
                if event.kind == "sync" or (event.kind == "coll" and event.op == "barrier"):
                    yield at(event, f"each round waits at `{name_of(event.node)}`.")


def _straight(items: Sequence[Item]) -> Iterator[TraceEvent]:
    """Yield the events that happen in any case."""
    for item in items:
        if isinstance(item, TraceEvent):
            yield item
        elif isinstance(item, CallItem):
            yield from _straight(item.body)


@rule("PL831")
def nothing_exchanged(first: WitnessTrace) -> Iterator[Spot]:
    """Report a training on each rank's part of the samples whose ranks never exchange anything."""
    witness = first.all[1]
    idle = ("barrier", "monitored_barrier")
    if any(event.op not in idle for event in witness.events("coll")):
        return
    if any(witness.events("grad", "wrap", "shard", "transfer")) or any(
        Taint.RANK & event.target.taint for event in witness.events("save") if event.target is not None
    ):
        return
    for step in _updates(witness.all_events):
        models = _models(step.target)
        own = any(one.fact("escaped") or one.fact("own_sync") for one in (step.target, *models))
        if own or step.started is not True:
            continue
        deps = [event.deps for event in witness.events("backward") if models & event.deps]
        loaders = {dep for some in deps for dep in some if dep.kind == "loader"}
        if any(one.attrs["sampler"].fact("distributed") for one in loaders):
            yield at(
                step, f"`{name_of(step.node)}` uses the gradients of this rank alone: nothing is exchanged."
            )


def _clips(items: Sequence[Item], scaled: TraceEvent | None, found: list[Spot]) -> TraceEvent | None:
    """Follow a path; return the backward whose gradients are scaled at its end."""
    for item in items:
        if isinstance(item, TraceEvent):
            if item.kind == "backward":
                scaled = item if item.scaler is not None and item.scaler.fact("enabled") else None
            elif item.kind in ("unscale", "grad") or (item.kind == "step" and item.what == "scaler"):
                scaled = None
            elif item.kind == "clip" and scaled is not None and set(item.deps) & set(scaled.deps):
                saw = f"`{name_of(item.node)}` clips gradients that the scaler has multiplied."
                found.append(at(item, saw))
        elif isinstance(item, CallItem):
            scaled = _clips(item.body, scaled, found)
        elif isinstance(item, LoopItem):
            _clips(item.body, None, found)
            scaled = None
        elif isinstance(item, BranchItem):
            ends = [_clips(arm, scaled, found) for arm in item.arms]
            scaled = ends[0] if len({id(end) for end in ends}) == 1 else None
    return scaled


@rule("PL075", "warning")
def forward_outside_no_sync(witness: WitnessTrace) -> Iterator[Spot]:
    """Report a backward under no_sync whose forward was outside of it."""
    for event in witness.events("backward"):
        if any(model.kind == "ddp" for model in event.late):
            saw = "the forward of this loss is outside of no_sync(), so gradients are summed nevertheless."
            yield at(event, saw)


@rule("PL050")
def backward_past_the_wrapper(witness: WitnessTrace) -> Iterator[Spot]:
    """Report a training that calls the inner module, and never the wrapper."""
    if any(witness.events("grad")) or any(event.op == "all_reduce" for event in witness.events("coll")):
        return
    backwards = list(witness.events("backward"))
    through = {dep for event in backwards for dep in event.deps if dep.kind in ("ddp", "fsdp")}
    wrapped: dict[Value, tuple[Value, Value]] = {}
    for item in witness.all_events:
        if item.kind == "wrap" and item.what == "ddp":
            for one in item.module.of_kind("model"):
                wrapped.update(dict.fromkeys(_parts(one), (one, item.wrapper)))
        for dep in item.deps if item.kind == "backward" else ():
            model, wrapper = wrapped.get(dep, (dep, dep))
            if (
                wrapper is dep
                or wrapper in through
                or any(one.fact("escaped") for one in (dep, model, wrapper))
            ):
                continue
            targets = [event.target for event in witness.events("step") if event.target.kind == "optimizer"]
            if not wrapper.fact("own_sync") and any(model in _models(target) for target in targets):
                yield at(item, "the forward goes past the wrapper, so gradients are not summed over ranks.")


@rule("PL052")
def optimizer_before_shards(witness: WitnessTrace) -> Iterator[Spot]:
    """Report an optimizer that holds the parameters from before the model was sharded."""
    made: list[TraceEvent] = []
    for item in witness.all_events:
        if item.kind == "optimizer":
            made.append(item)
        elif item.kind == "shard" or (
            item.kind == "wrap" and item.what == "fsdp" and not item.wrapper.fact("use_orig_params")
        ):
            models = item.model.alternatives() if item.kind == "shard" else item.module.alternatives()
            models = [model for model in models if model.kind == "model"]
            for event in made:
                optimizer = event.optimizer
                steps = any(step.target is optimizer for step in witness.events("step"))
                given = any(model in optimizer.deps for model in models)
                if steps and given and not optimizer.fact("escaped") and not optimizer.fact("regrouped"):
                    name = name_of(event.node)
                    yield at(event, f"`{name}` gets parameters that sharding replaces (line {item.line}).")


@rule("PL054")
def frozen_after_wrapping(witness: WitnessTrace) -> Iterator[Spot]:
    """Report requires_grad that changes after DDP has counted the parameters."""
    items = witness.all_events
    arms = [arm for item in witness.all_items if isinstance(item, BranchItem) for arm in item.arms]
    partly = {id(event.node) for arm in arms for event in events(arm, "requires_grad")}
    for wrap in [item for item in items if item.kind == "wrap" and item.what == "ddp"]:
        wrapper, later = wrap.wrapper, items[items.index(wrap) + 1 :]
        inner = {one for one in wrap.module.alternatives() if one.kind == "model"}
        again = any(one.kind == "wrap" and inner & set(one.module.alternatives()) for one in later)
        is_open = wrapper.fact("find_unused_parameters") or wrapper.fact("escaped")
        changes = [
            event
            for event in later
            if event.kind == "requires_grad" and event.value.is_known
            if ({wrapper} | inner) & {event.target, *event.target.deps}
        ]
        toggles = len({bool(event.value.const) for event in changes}) > 1
        if again or is_open or toggles or wrapper not in trains(witness):
            continue
        for event in changes:  # all of a model is a teacher: without any gradient there is no backward
            if event.value.const or event.target.fact("part") or id(event.node) in partly:
                yield at(event, "requires_grad changes after DDP has wrapped the model.")


@rule("PL065", "warning")
def data_parallel(witness: WitnessTrace) -> Iterator[Spot]:
    """Report DataParallel in a process that is one of several ranks."""
    for event in witness.events("wrap"):
        if event.what == "dp" and event.started is True:
            yield at(event, "each rank would run on all devices of its node.")
