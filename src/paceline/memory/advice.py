"""Lists settings that would have fitted, with the bytes that each saves.

What a step needs at its peak is estimated: activations grow with the part of the model that the forward had
not reached yet, and gradients and optimizer state that did not exist yet are added.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.memory.account import Account
from paceline.memory.causes import Cause, find_cause, is_alone

# An estimate must leave this part of the limit free.
_FREE = 0.05
_MOST_DIVISIONS = 1024
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
    """

    name: str
    words: str
    saves: int
    fits: bool


@dataclass(frozen=True)
class Need:
    """The memory that a whole step would need, in bytes of this rank.

    Attributes:
        activations: at the end of the forward.
        state: parameters, gradients and optimizer state.
        other: all else.
    """

    activations: int
    state: int
    other: int

    @property
    def total(self) -> int:
        """The peak."""
        return self.activations + self.state + self.other


def estimate_need(account: Account) -> Need:
    """Return the estimate of a step's peak."""
    held = account.get("activations")
    reached = min(1.0, max(account.progress.reached, 0.02))
    grows = account.progress.phase == "forward" and account.progress.has_graph
    whole = held / reached if grows else held
    # The failed allocation is part of what the forward had not reached; it counts if it is more than that.
    activations = max(int(whole), held + account.get("request"))
    is_training = not account.progress.is_evaluating
    gradients = max(account.get("gradients"), account.model.trained if is_training else 0)
    optimizer = max(account.get("optimizer"), account.model.expected_state if is_training else 0)
    # Gradients appear while activations go.
    during = account.get("gradients") if activations > gradients else gradients
    state = account.get("parameters", "buffers", "gathered", "buckets") + optimizer + during
    other = account.total - account.get(
        *("activations", "request", "parameters", "buffers", "gathered", "buckets", "gradients", "optimizer")
    )
    return Need(activations, state, max(0, other))


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
    need, room, cause = estimate_need(account), find_room(account), find_cause(account)
    found: list[tuple[str, str, int]] = []
    found += _release(account, cause)
    if cause == "evaluation":
        found.append(
            ("no_grad", "evaluate under torch.no_grad(), which saves nothing for backward", need.activations)
        )
    else:
        found += _shrink(account, settings, need, room)
    found += _divide(account, settings, need)
    remedies = [
        Remedy(name, words, int(saves), bool(room) and need.total - saves <= room)
        for name, words, saves in found
        if saves > _LEAST * need.total
    ]
    # What should not be there comes first, whether or not it is enough.
    first = ("release", "no_grad", "workers")
    return sorted(remedies, key=lambda one: (one.name not in first, not one.fits, -one.saves))


def _release(account: Account, cause: Cause) -> list[tuple[str, str, int]]:
    found = []
    for holder in account.holders:
        if holder.graphs:
            what = f"keep {holder.variable}.item() or .detach() in place of graphs"
            found.append(("release", f"{what} ({holder.place})", holder.num_bytes))
        elif cause == "kept":
            what = f"do not keep {holder.variable} whole, or keep it on disk"
            found.append(("release", f"{what} ({holder.place})", holder.num_bytes))
    if workers := account.get("loader workers"):
        half = max(1, account.num_workers // 2)
        found.append(
            ("workers", f"use {half} loader workers in place of {account.num_workers}", workers // 2)
        )
    return found


def _shrink(account: Account, settings: MemorySettings, need: Need, room: int) -> list[tuple[str, str, int]]:
    """Return settings by which a step computes or keeps less at once."""
    found = []
    size = settings.microbatch_size or _guess_samples(account)
    per_batch = need.activations + account.get("batch")
    parts = 2
    while parts * 2 <= min(size, _MOST_DIVISIONS) and need.total - per_batch * (1 - 1 / parts) > room:
        parts *= 2
    if size != 1 and account.get("activations", "request", "batch"):
        smaller = size // parts
        share = 1 - smaller / size if size else 1 / 2
        if settings.is_trainer and size:
            words = f"microbatch_size={smaller} in place of {size}; the global batch stays"
        elif size:
            words = f"microbatches of {smaller} samples in place of {size}, their gradients added up"
        else:
            words = "microbatches of half as many samples, their gradients added up"
        if is_alone(account):
            words += ", or a bound on the length of this rank's samples"
        found.append(("microbatch", words, int(per_batch * share)))
    number = account.model.num_repeated
    if number > 1 and account.progress.has_graph and not settings.recomputes:
        share = min(1.0, account.model.repeated_activations / max(1, account.get("activations")))
        # Of each block its input stays, an eighth at most of a transformer's; one is whole at a time.
        saves = need.activations * share * (1 - 1 / number) * 7 / 8
        words = (
            "layout recompute=block"
            if settings.is_trainer
            else f"torch.utils.checkpoint on the {number} modules of {account.model.repeated or 'the model'}"
        )
        found.append(("recompute", words, int(saves)))
    if account.model.fp32_activations and settings.dtype in ("", "fp32"):
        share = account.model.fp32_activations / max(1, account.get("activations", "kept graphs"))
        words = "dtype=bf16" if settings.is_trainer else "torch.autocast with bfloat16"
        found.append(("bf16", words, int(need.activations * min(1.0, share) / 2)))
    return found


def _divide(account: Account, settings: MemorySettings, need: Need) -> list[tuple[str, str, int]]:
    """Model state on more ranks, or elsewhere."""
    found = []
    ranks = max(settings.dp, 2)
    more = "" if settings.dp > 1 else " (on twice the ranks)"
    divided = int(need.state * (1 - 1 / ranks))
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
        found.append(("offload", words, need.state))
    return found


def _guess_samples(account: Account) -> int:
    """Return the samples of the largest input: its first dimension."""
    return account.batch[0].shape[0] if account.batch and account.batch[0].shape else 0
