"""Faults planted in islands are found: by a plain loop, by a codec of one process, and by `verify`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.comm.codec import CODECS, choose_codec
from paceline.comm.residuals import Residuals, RowRange
from paceline.train.islands import Islands
from paceline.verifying.check import resolve_layout, verify_subject
from paceline.verifying.subject import UserSubject
from tests.dist.pool import Pool
from tests.train.test_islands import (
    NUM_STEPS,
    SAMPLES,
    SETTINGS,
    build,
    build_model,
    build_optimizer,
    loss_of,
    train_plainly,
    whole,
)

OUTER = (0.9, 0.5, True)


def change_sums(
    monkeypatch: pytest.MonkeyPatch,
    before: Callable[[int, Tensor], Tensor] = lambda island, change: change,
    after: Callable[[list[Tensor]], list[Tensor]] = lambda totals: totals,
) -> None:
    """Change what islands that are apart bring to a sum, and the sum."""
    add = Islands._sum

    def add_changed(self: Islands, own: Any) -> list[Tensor]:
        if not self.is_split:
            return add(self, own)
        brought = [[before(i, change) for change in each] for i, each in zip(self._own, own, strict=True)]
        return after(add(self, brought))

    monkeypatch.setattr(Islands, "_sum", add_changed)


def leave_out_a_fragment(monkeypatch: pytest.MonkeyPatch) -> None:
    change_sums(monkeypatch, after=lambda totals: [*totals[:-1], torch.zeros_like(totals[-1])])


def turn_the_sign(monkeypatch: pytest.MonkeyPatch) -> None:
    change_sums(monkeypatch, after=lambda totals: [total.neg() for total in totals])


def weight_unevenly(monkeypatch: pytest.MonkeyPatch) -> None:
    change_sums(monkeypatch, before=lambda island, change: change * (1.5, 1.0, 1.0, 0.5)[island])


def apply_a_step_early(monkeypatch: pytest.MonkeyPatch) -> None:
    split = Islands._split

    def split_late(self: Islands) -> None:
        split(self)
        self.num_apart = 1

    monkeypatch.setattr(Islands, "_split", split_late)


def forget_momentum(monkeypatch: pytest.MonkeyPatch) -> None:
    load = Islands.load

    def load_without(self: Islands, state: dict[str, Any]) -> None:
        load(self, state | {"momentum": None} if state else state)

    monkeypatch.setattr(Islands, "load", load_without)


def forget_moments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every island take its turn with the inner optimizer of the one before."""
    write = Islands._write

    def write_without(self: Islands, kept: dict[str, Any]) -> None:
        write(self, kept | {"optimizer": self._read()["optimizer"]})

    monkeypatch.setattr(Islands, "_write", write_without)


def drop_momentum(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every exchange start without momentum."""
    exchange = Islands.exchange

    def exchange_without(self: Islands, step: int, signum: int) -> Any:
        assert self._outer is not None
        self._outer.state.clear()
        return exchange(self, step, signum)

    monkeypatch.setattr(Islands, "exchange", exchange_without)


def swap_residuals(monkeypatch: pytest.MonkeyPatch) -> None:
    take = Residuals.take
    monkeypatch.setattr(
        Residuals, "take", lambda self, slot, piece: take(self, slot ^ 1 if slot >= 0 else slot, piece)
    )


PLANTED: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    each.__name__: each
    for each in (
        leave_out_a_fragment,
        turn_the_sign,
        weight_unevenly,
        apply_a_step_early,
        forget_momentum,
        forget_moments,
    )
}


def train_in_two_starts(world: Any, planted: str, folder: str) -> list[Tensor]:
    """Train up to a step inside of the second period, and go on from its checkpoint."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        if planted:
            PLANTED[planted](monkeypatch)
        for last in (6, NUM_STEPS):
            trainer = build(dtype="fp64")
            trainer.resume(folder)
            for share in trainer.loader(SAMPLES, global_batch_size=16, shuffle=False, epochs=9):
                trainer.step(share)
                if trainer.step_number == last:
                    break
            if last == 6:
                trainer.save(wait=True)
                trainer.close()
        trainer.synchronize()
        return whole(trainer)


@pytest.mark.parametrize("planted", ["", *PLANTED])
def test_a_planted_fault_moves_islands_away_from_a_plain_loop(
    ranks: Pool, planted: str, tmp_path: Any
) -> None:
    truth = train_plainly(4, 3, 2, NUM_STEPS, OUTER)
    [found] = ranks.run(train_in_two_starts, nproc=1, args=(planted, str(tmp_path)))
    apart = max(float((own - expected).abs().max()) for own, expected in zip(found, truth, strict=True))
    assert apart > 1e-6 if planted else apart < 1e-12


def compare_exchanges(world: Any, planted: bool) -> list[float]:
    """Return how far each exchange of int8 is from one that is computed here, from the islands' weights."""
    codec = CODECS["int8"]
    residuals: dict[tuple[int, int], Tensor] = {}
    momenta: dict[int, Tensor] = {}
    apart: list[float] = []

    def encode(place: int, slot: int, rows: Tensor) -> Tensor:
        """Return rows as they arrive, with what the last exchange has lost added."""
        piece = RowRange.all_of("", rows.shape)
        one = choose_codec(codec, piece.length)
        sent = rows.reshape(piece.num_rows, piece.length) + residuals.get((place, slot), 0.0)
        target = torch.empty(piece.num_rows, one.count_row_bytes(piece.length), dtype=torch.uint8)
        one.encode(sent.clone(), target)
        arrived = one.decode(target, piece.length)
        residuals[place, slot] = sent - arrived
        return arrived.reshape(rows.shape)

    exchange = Islands.exchange

    def compare(self: Islands, step: int, signum: int) -> Any:
        before = [tensor.clone() for tensor in self._global]
        held = [[t.clone() for t in self._held(i, self._tensors, "weights")] for i in self._own]
        found = exchange(self, step, signum)
        for place, start in enumerate(before):
            a, b, c, d = (encode(place, i, start - own[place]) for i, own in enumerate(held))
            change = encode(place, 4, (a + b) + (c + d)) / 4
            momenta[place] = change if place not in momenta else 0.5 * momenta[place] + change
            expected = start - 0.9 * (change + 0.5 * momenta[place])
            apart.append(float((expected - self._global[place]).abs().max()))
        return found

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(Islands, "exchange", compare)
        if planted:
            swap_residuals(monkeypatch)
        trainer = build(SETTINGS | {"codec": "int8"})
        for share in trainer.loader(SAMPLES, global_batch_size=16, shuffle=False):
            trainer.step(share)
            if trainer.step_number == NUM_STEPS:
                break
        trainer.synchronize()
    return apart


def test_what_the_codec_loses_is_added_to_the_same_island(ranks: Pool) -> None:
    [apart] = ranks.run(compare_exchanges, nproc=1, args=(False,))
    assert len(apart) == 3 * 4
    assert max(apart) < 1e-7
    [apart] = ranks.run(compare_exchanges, nproc=1, args=(True,))
    assert max(apart) > 1e-5


def call_planted(plant: Callable[[pytest.MonkeyPatch], None], fn: Callable[..., Any], args: Any) -> Any:
    with pytest.MonkeyPatch.context() as monkeypatch:
        plant(monkeypatch)
        return fn(*args)


@pytest.mark.parametrize(
    ("plant", "codec"),
    [
        (None, "none"),
        (None, "int8"),
        (leave_out_a_fragment, "none"),
        (turn_the_sign, "none"),
        (weight_unevenly, "none"),
        (apply_a_step_early, "none"),
        (drop_momentum, "none"),
        (swap_residuals, "int8"),
    ],
)
def test_verify_compares_islands_on_ranks_with_islands_in_turns(ranks: Pool, plant: Any, codec: str) -> None:
    def run(fn: Callable[..., Any], nproc: int, args: Any) -> list[Any]:
        if plant is not None and nproc > 1:
            fn, args = call_planted, (plant, fn, args)
        return ranks.run(fn, nproc, args, 60.0, world=False)

    subject = UserSubject(
        model_fn=partial(build_model, with_statistics=True),
        batch_fn=give_batch,
        loss=loss_of,
        forward=None,
        optimizer=build_optimizer,
        num_steps=3,
        dtype="fp64",
        # A codec turns a last bit into a step of its own, so only the same bits show a swap.
        reduction="fast" if codec == "none" else "exact",
        clip_norm=5.0,
        microbatch_size=2,
        global_batch_size=None,
        seed=0,
        settings={"islands": {"count": 4, "codec": codec}},
    )
    layouts = [resolve_layout("dp_replicate=2")]
    if plant is None:
        layouts.append(resolve_layout("dp_replicate=4"))
    found = verify_subject(subject, layouts, run=run)
    assert [remark.code for remark in found.remarks] == ["PL724"]
    if plant is None:
        assert found.ok, found
        assert found.num_steps == 5
        return
    [finding] = found.findings
    assert finding.code == "PL744"
    # The first exchange ends step 3, and has neither momentum nor residuals.
    step = {apply_a_step_early: 2, drop_momentum: 5, swap_residuals: 5}.get(plant, 3)
    assert finding.where.startswith(f"dp_replicate=2, step {step}"), finding


def give_batch(step: int) -> Tensor:
    return SAMPLES[16 * step - 16 : 16 * step]
