"""Lists settings that would have fitted, with the bytes that each saves.

A setting fits if the upper end of what a step then needs leaves some of the limit free.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from paceline.memory.account import Account
from paceline.memory.causes import Cause, find_cause, is_alone
from paceline.memory.need import Need, estimate_need

# An estimate must leave this part of the limit free.
_FREE = 0.05
_MOST_HALVINGS = 10
# Of the memory that a remedy must save to be listed at all.
_LEAST = 0.02


@dataclass(frozen=True)
class MemorySettings:
    """The settings that a user could change.

    Attributes:
        microbatch_size: samples per forward; 0 if not known.
        is_trainer: whether the words of `Trainer` and recipes apply, and not those of a script's own loop.
        recomputes: whether activations are computed again already.
        dtype: of the computation, such as `"fp32"`; "" if not known.
        dp: data ranks, among which state can be sharded.
    """

    microbatch_size: int = 0
    is_trainer: bool = False
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
        least: bytes that a step then needs at least.
        most: at most.
    """

    name: str
    words: str
    saves: int
    fits: bool
    least: int = 0
    most: int = 0


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
        account: of the rank that ran short.
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
        remedies.append(Remedy(name, words, now - after.total, after.most <= room, after.total, after.most))
    # What should not be there comes first, whether or not it is enough.
    first = ("release", "no_grad", "workers")
    return sorted(remedies, key=lambda one: (one.name not in first, not one.fits, -one.saves))


def estimate_now(account: Account) -> int:
    """Return what a step needs as the training is: no less than what it had when it ran short."""
    return max(estimate_need(account).total, account.total)


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
        if settings.is_trainer and size:
            words = f"microbatch_size={smaller} in place of {size}; the global batch stays"
        elif size:
            words = f"microbatches of {smaller} samples in place of {size}, their gradients added up"
        else:
            words = "microbatches of half as many samples, their gradients added up"
        if is_alone(account):
            words += ", or a bound on the length of this rank's samples"
        found.append(("microbatch", words, needs.get(smaller) or _divide_samples(account, cause, 1 / 2)))
    number = model.num_repeated
    if number > 1 and account.progress.has_graph and not settings.recomputes:
        words = (
            "layout recompute=block"
            if settings.is_trainer
            else f"torch.utils.checkpoint on the {number} modules of {model.repeated or 'the model'}"
        )
        share = min(1.0, model.repeated_activations / max(1, account.get("activations")))
        # Of each block its input stays, an eighth at most of a transformer's; one is whole at a time.
        found.append(("recompute", words, need.shrink(1 - share * (1 - 1 / number) * 7 / 8)))
    if model.fp32_activations and settings.dtype in ("", "fp32"):
        words = "dtype=bf16" if settings.is_trainer else "torch.autocast with bfloat16"
        share = min(1.0, model.fp32_activations / max(1, account.get("activations", "kept graphs")))
        found.append(("bf16", words, need.shrink(1 - share / 2)))
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
        words = f"layout dp_shard={ranks}" if settings.is_trainer else f"fully_shard over {ranks} ranks"
        found.append(("dp_shard", words + more, divided))
        words = f"layout tp={ranks}" if settings.is_trainer else f"tensor parallelism over {ranks} ranks"
        found.append(("tp", words + more, divided))
    if account.limit_kind == "device":
        words = (
            "layout offload=cpu with dp_shard"
            if settings.is_trainer
            else "parameters and state offloaded to CPU"
        )
        found.append(("offload", words, replace(estimate_need(account), state=0)))
    return found


def _guess_samples(account: Account) -> int:
    """Return the samples of the largest input: its first dimension."""
    return account.batch[0].shape[0] if account.batch and account.batch[0].shape else 0
