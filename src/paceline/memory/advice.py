"""Lists settings that would have fitted, with the bytes that each saves.

A forward that was half through is taken to need as much again per parameter that it had not used. The peak is
the larger one of two: all activations beside the gradients that are there already, or all gradients. On top
comes what does not change: Python, libraries, the batch, and what variables keep. Not known are results that
live for a moment and gradients of activations: a setting fits if there is room for a part of the activations
more, and some of the limit stays free.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from paceline.memory.account import Account
from paceline.memory.causes import Cause, find_cause

# An estimate must leave this part of the limit free.
_FREE = 0.05
_MOST_HALVINGS = 10
# Of the memory that a remedy must save to be listed at all.
_LEAST = 0.02
_STATE = ("parameters", "buffers", "gathered")
_LEAST_REACHED = 0.02
# A sharded module is whole in several copies: gathered, as parameters, and as gradients that are reduced.
_COPIES = 4
# Gradients of activations and passing results, beside what was saved: measured, up to this part of it; and
# with the pieces between them that glibc keeps (benchmarks/memory).
_PASSING, _PASSING_ON_CPU = 0.25, 0.75


@dataclass(frozen=True)
class MemorySettings:
    """The settings that a user could change.

    Attributes:
        microbatch_size: samples per forward; 0 if not known.
        recomputes: whether activations are computed again already.
        dtype: of the computation, such as `"fp32"`; "" if not known.
        dp: data ranks, among which state can be sharded.
    """

    microbatch_size: int = 0
    recomputes: bool = False
    dtype: str = ""
    dp: int = 1


@dataclass(frozen=True)
class Remedy:
    """One setting that would reduce the memory.

    Attributes:
        name: of the setting: `microbatch`, `recompute`, `dp_shard`, `tp`, `offload`, `bf16`, `release`,
            `no_grad`, `workers`.
        words: what to do.
        saves: bytes.
        fits: whether it alone would have been enough.
    """

    name: str
    words: str
    saves: int
    fits: bool


@dataclass(frozen=True)
class Need:
    """The memory that a whole step would need, in bytes of this rank.

    Attributes:
        activations: at the peak.
        state: parameters, gradients and optimizer state.
        passing: the part of the activations by which the need may be higher.
    """

    activations: int
    state: int
    other: int
    passing: float = _PASSING

    @property
    def total(self) -> int:
        """The peak."""
        return self.activations + self.state + self.other

    @property
    def most(self) -> int:
        """The room that it must have."""
        return self.total + int(self.activations * self.passing)

    def shrink(self, share: float) -> Need:
        """Return the need with this share of the activations."""
        return replace(self, activations=int(self.activations * share))


_Found = list[tuple[str, str, Need]]
"""Settings: the name, what to do, and what a step then needs."""


def find_room(account: Account) -> int:
    """Return the bytes that this rank may use, with some to spare; 0 if the limit is not known."""
    if not account.limit:
        return 0
    outside = max(0, account.used + account.get("request") - account.total)
    return max(1, int(account.limit * (1 - _FREE)) - outside)


def list_remedies(account: Account, settings: MemorySettings | None = None) -> list[Remedy]:
    """Return what would have saved memory: first what fits alone, each group by the bytes saved.

    Args:
        settings: that the user has; `None` for a script of one's own.
    """
    settings = settings or MemorySettings(dp=account.num_ranks)
    now, room, cause, need = (
        estimate_now(account),
        find_room(account),
        find_cause(account),
        estimate_need(account),
    )
    # What grows from step to step fills any room.
    is_leak = cause in ("kept graphs", "kept")
    found = _release(account, cause, need)
    if cause == "evaluation":
        words = "evaluate under torch.no_grad(), which saves nothing for backward"
        found.append(("no_grad", words, need.shrink(1 / max(2, account.model.num_repeated))))
    elif not is_leak:
        found += _shrink(account, settings, room, cause)
    found += _divide(account, settings)
    remedies = []
    for name, words, after in found:
        if now - after.total <= _LEAST * now:
            continue
        remedies.append(Remedy(name, words, now - after.total, after.most <= room))
    # What should not be there comes first, whether or not it is enough.
    first = ("release", "no_grad", "workers")
    return sorted(remedies, key=lambda one: (one.name not in first, not one.fits, -one.saves))


def estimate_now(account: Account) -> int:
    """Return what a step needs as the training is: no less than what it had when it ran short."""
    return max(estimate_need(account).total, account.total)


def estimate_need(account: Account, *, ranks: int = 1, accumulates: bool = False) -> Need:
    """Return the estimate of a step's peak.

    Args:
        ranks: among which parameters, gradients and optimizer state are sharded.
        accumulates: whether gradients of earlier microbatches are there when a forward begins.
    """
    model, activations = account.model, _estimate_saved(account)
    is_training = not account.progress.is_evaluating
    gradients = max(account.get("gradients"), model.trained if is_training else 0)
    optimizer = max(account.get("optimizer"), model.expected_state if is_training else 0)
    held = gradients if accumulates else account.get("gradients")
    fixed = account.get(*_STATE) + optimizer
    if ranks > 1:
        fixed, gradients, held = (size // ranks for size in (fixed, gradients, held))
        fixed += _COPIES * model.largest_module
    # Gradients appear while activations go.
    state = fixed + max(held, gradients - activations)
    known = account.get(*_STATE, "activations", "request", "gradients", "optimizer")
    passing = _PASSING if account.limit_kind == "device" else _PASSING_ON_CPU
    return Need(activations, state, max(0, account.total - known), passing)


def _estimate_saved(account: Account) -> int:
    """Return the activations at the forward's end from their bytes so far."""
    held = account.get("activations")
    grows = account.progress.phase == "forward" and account.progress.has_graph
    reached = min(1.0, max(account.progress.reached, _LEAST_REACHED))
    # The failed allocation is part of what the forward had not reached; it counts if it is more than that.
    return max(int(held / reached if grows else held), held + account.get("request"))


def _release(account: Account, cause: Cause, need: Need) -> _Found:
    found = []
    for holder in account.holders:
        if holder.graphs:
            what = f"keep {holder.variable}.item() or .detach() in place of graphs"
        elif cause == "kept":
            what = f"do not keep {holder.variable} whole, or keep it on disk"
        else:
            continue
        less = replace(need, other=max(0, need.other - holder.num_bytes))
        found.append(("release", f"{what} ({holder.place})", less))
    if workers := account.get("loader workers"):
        half = max(1, account.num_workers // 2)
        words = f"use {half} loader workers in place of {account.num_workers}"
        found.append(("workers", words, replace(need, other=need.other - workers // 2)))
    return found


def _shrink(account: Account, settings: MemorySettings, room: int, cause: Cause) -> _Found:
    """Return settings by which a step computes or keeps less at once."""
    found, need, model = [], estimate_need(account), account.model
    size = settings.microbatch_size or _guess_samples(account)
    if size != 1 and account.get("activations", "request", "batch"):
        sizes = [size >> halvings for halvings in range(1, _MOST_HALVINGS + 1) if size >> halvings]
        needs = {smaller: _divide_samples(account, cause, smaller / size) for smaller in sizes}
        smaller = next((each for each in sizes if needs[each].most <= room), size // 2)
        what = f"{smaller} samples in place of {size}" if size else "half as many samples"
        words = f"microbatches of {what} (microbatch_size), their gradients added up"
        found.append(("microbatch", words, needs.get(smaller) or _divide_samples(account, cause, 1 / 2)))
    number = model.num_repeated
    if number > 1 and account.progress.has_graph and not settings.recomputes:
        where = f"the {number} modules of {model.repeated or 'the model'}"
        words = f"layout recompute=block, or torch.utils.checkpoint on {where}"
        share = min(1.0, model.repeated_activations / max(1, account.get("activations")))
        # Of each block its input stays, an eighth at most of a transformer's; one is whole at a time.
        found.append(("recompute", words, need.shrink(1 - share * (1 - 1 / number) * 7 / 8)))
    if model.fp32_activations and settings.dtype in ("", "fp32"):
        share = min(1.0, model.fp32_activations / max(1, account.get("activations", "kept graphs")))
        found.append(("bf16", "dtype=bf16, or torch.autocast with bfloat16", need.shrink(1 - share / 2)))
    return found


def _divide_samples(account: Account, cause: Cause, share: float) -> Need:
    """Return what a step needs that computes this share of its samples at once."""
    need = estimate_need(account, accumulates=True).shrink(share)
    batch = account.get("batch") if cause == "batch" else 0
    return replace(need, other=max(0, need.other - int(batch * (1 - share))))


def _divide(account: Account, settings: MemorySettings) -> _Found:
    """Return settings that divide model state among more ranks, or keep it elsewhere."""
    found = []
    ranks = max(settings.dp, 2)
    more = "" if settings.dp > 1 else " (on twice the ranks)"
    divided = estimate_need(account, ranks=ranks)
    if not account.model.is_sharded:
        words = f"layout dp_shard={ranks}, or fully_shard over {ranks} ranks{more}"
        found += [("dp_shard", words, divided), ("tp", f"layout tp={ranks}{more}", divided)]
    if account.limit_kind == "device":
        away = replace(estimate_need(account), state=0)
        found.append(("offload", "layout offload=cpu with dp_shard", away))
    return found


def _guess_samples(account: Account) -> int:
    """Return the samples of the largest input: its first dimension."""
    return account.batch[0].shape[0] if account.batch and account.batch[0].shape else 0
