"""Compressed gradients: the same bits on any number of ranks, residuals over skips and starts, refusals."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from paceline.comm.residuals import Residuals
from paceline.errors import PacelineError
from paceline.train.trainer import Trainer
from tests.dist.pool import Pool, RankError

SAMPLES = torch.randn(44, 40, generator=torch.Generator().manual_seed(7))
KINDS = ("bf16", "int8", "int4")


def build(kind: str = "int8", **settings: Any) -> Trainer:
    torch.manual_seed(0)
    compress = {"kind": kind, "slots": 4} | settings.pop("compress", {})
    return Trainer(
        # Rows of 40 and of 300 (two blocks); biases, which are not compressed.
        nn.Sequential(nn.Linear(40, 300), nn.ReLU(), nn.Linear(300, 50), nn.ReLU(), nn.Linear(50, 8)),
        loss=lambda output, batch: (output.square().sum(), len(output)),
        optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=1e-2),
        compress=compress if kind != "none" else None,
        microbatch_size=2,
        **settings,
    )


def train(
    world: Any, first: int, last: int, folder: str | None = None, bad: int = 0, options: Any = None
) -> tuple[list[str | None], list[Tensor], list[Tensor]]:
    """Take steps `first` to `last`; `bad` has an infinite sample, and an epoch ends ragged."""
    options = dict(options or {})
    broken, accept = options.pop("broken", None), options.pop("accept", ())
    layout = options.pop("layout", "")
    layout = layout if world.world_size > 1 else ""
    trainer = build(layout=layout, **options)
    if broken is not None:
        BREAKS[broken](trainer)
    samples = SAMPLES.clone()
    loader = trainer.loader(samples, global_batch_size=16, epochs=9)
    if folder is not None:
        assert trainer.resume(folder, accept=accept) == first - 1
    skipped = []
    for share in loader:
        if trainer.step_number + 1 == bad:
            for number, microbatch in share.microbatches:
                if number == 5:
                    microbatch[0, 0] = math.inf
        skipped.append(trainer.step(share).skipped)
        if trainer.step_number == last:
            break
    if folder is not None:
        trainer.save(wait=True)
    compression = trainer._updates["model"].compression
    kept = [] if compression is None else [rows for _, _, rows in compression.residuals.list_kept()]
    return skipped, [gather_whole(p) for p in trainer.model.parameters()], kept


def gather_whole(parameter: Tensor) -> Tensor:
    whole = parameter.detach()
    return (whole.full_tensor() if isinstance(whole, DTensor) else whole).clone()


def forget_on_resume(trainer: Trainer) -> None:
    compression = trainer._updates["model"].compression
    assert compression is not None
    compression.residuals.load = lambda whole: None  # type: ignore[method-assign]


def keep_when_skipped(trainer: Trainer) -> None:
    compression = trainer._updates["model"].compression
    assert compression is not None
    settle = compression.residuals.settle
    compression.residuals.settle = lambda *, keep: settle(keep=True)  # type: ignore[method-assign]


def ignore_the_unit(trainer: Trainer) -> None:
    compression = trainer._updates["model"].compression
    assert compression is not None
    # Its factor is 1, whatever an update sets.
    one = property(lambda _: 1.0, lambda *_: None)
    compression.__class__ = type("Unscaled", (type(compression),), {"factor": one})


def swap_slots(trainer: Trainer) -> None:
    compression = trainer._updates["model"].compression
    assert compression is not None
    load = Residuals.load

    def swapped(whole: dict[tuple[int, str], Tensor]) -> None:
        other = {slot: slot if slot < 0 else slot ^ 1 for slot, _ in whole}
        load(compression.residuals, {(other[slot], name): value for (slot, name), value in whole.items()})

    compression.residuals.load = swapped  # type: ignore[method-assign,assignment]


BREAKS = {
    "forgets on resume": forget_on_resume,
    "keeps when skipped": keep_when_skipped,
    "ignores the unit": ignore_the_unit,
    "swaps slots": swap_slots,
}


def are_equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_bits_on_1_2_and_4_ranks(ranks: Pool, kind: str) -> None:
    # Steps 3 and 6 are ragged: 6 microbatches over 4 slots.
    results = [ranks.run(train, nproc=n, args=(1, 7, None, 0, {"kind": kind})) for n in (1, 2, 4)]
    expected = results[0][0][1]
    assert all(p.isfinite().all() for p in expected)
    for on_ranks in results:
        for _, parameters, _ in on_ranks:
            assert are_equal(parameters, expected)
    uncompressed = ranks.run(train, nproc=1, args=(1, 7, None, 0, {"kind": "none"}))
    assert not are_equal(uncompressed[0][1], expected)
    # Residuals exist for the compressed matrices.
    assert any(rows.any() for rows in results[0][0][2])


@pytest.mark.parametrize("kind", ["int8", "bf16"])
def test_a_resumed_run_keeps_its_residuals_on_other_ranks(ranks: Pool, tmp_path: Path, kind: str) -> None:
    whole = ranks.run(train, nproc=1, args=(1, 8, None, 5, {"kind": kind}))[0]
    assert [reason is not None for reason in whole[0]] == [number == 5 for number in range(1, 9)]
    for mode in ("full", "sharded"):
        folder = str(tmp_path / mode)
        options = {"checkpoint_mode": mode, "kind": kind}
        ranks.run(train, nproc=2, args=(1, 2, folder, 5, options))
        ranks.run(train, nproc=4, args=(3, 4, folder, 5, options))
        ranks.run(train, nproc=1, args=(5, 5, folder, 5, options))  # the skipped step, then a save
        resumed = ranks.run(train, nproc=2, args=(6, 8, folder, 5, options))
        assert are_equal(resumed[0][1], whole[1])
        assert are_equal(resumed[1][1], whole[1])


@pytest.mark.parametrize("broken", ["forgets on resume", "keeps when skipped", "swaps slots"])
def test_a_lost_residual_changes_bits(ranks: Pool, tmp_path: Path, broken: str) -> None:
    whole = ranks.run(train, nproc=1, args=(1, 8, None, 3))[0]
    ranks.run(train, args=(1, 4, str(tmp_path), 3, {"broken": broken}))
    resumed = ranks.run(train, args=(5, 8, str(tmp_path), 3, {"broken": broken}))
    assert not are_equal(resumed[0][1], whole[1])


def test_residuals_do_not_depend_on_the_loss_scale(ranks: Pool) -> None:
    """Scaled by the loss scale, a residual is wrong by the factor by which the scale changes."""
    # The loss scale is 65536 at first, and half of it after each skipped step.
    options = {"dtype": "fp16", "kind": "int4"}
    kept = ranks.run(train, nproc=1, args=(1, 8, None, 3, options))[0][2]
    unscaled = ranks.run(train, nproc=1, args=(1, 8, None, 3, {**options, "broken": "ignores the unit"}))[0][
        2
    ]
    plain = ranks.run(train, nproc=1, args=(1, 8, None, 3, {**options, "dtype": "fp32"}))[0][2]
    sizes = [float(torch.cat([rows.flatten() for rows in each]).norm()) for each in (kept, plain, unscaled)]
    assert 0.1 * sizes[1] < sizes[0] < 10 * sizes[1]
    assert sizes[2] > 100 * sizes[1]


def test_fewer_bytes_are_sent(ranks: Pool) -> None:
    sent = {kind: ranks.run(count_sent, nproc=2, args=(kind,))[0] for kind in KINDS}
    num_bytes, num_whole = 4 * (300 * 40 + 50 * 300 + 8 * 50), 4 * (300 + 50 + 8)
    for kind, share in {"bf16": 1 / 2, "int8": 1 / 4, "int4": 1 / 8}.items():
        # Two slots per rank: half of each is sent, and half of the sum. Scales and biases come on top.
        assert 1.5 * share * num_bytes <= sent[kind] <= 1.5 * (share * num_bytes + num_whole + num_bytes / 32)


def count_sent(world: Any, kind: str) -> int:
    trainer = build(kind)
    loader = trainer.loader(SAMPLES, global_batch_size=16, shuffle=False)
    reduction: Any = trainer._updates["model"].runner._exact  # type: ignore[attr-defined]
    trainer.step(next(iter(loader)))
    number: int = reduction.ranks.slots.sent_bytes
    return number


REFUSALS: dict[str, tuple[int, dict[str, Any], str]] = {
    "axis": (2, {"layout": "cp=2"}, "PL958"),
    "shards": (2, {"layout": "dp_shard=2"}, "PL958"),
    "fast": (2, {"reduction": "fast"}, "PL959"),
    "slots that the ranks do not divide": (2, {"compress": {"slots": 3}}, "PL960"),
    "one rank and one slot": (1, {"compress": {"slots": None}}, "PL960"),
    "fp64": (1, {"dtype": "fp64"}, "PL961"),
    "slots without a kind": (1, {"compress": {"kind": "none"}}, "PL962"),
    "more slots than microbatches": (1, {"compress": {"slots": 16}}, "PL963"),
    "unknown kind": (1, {"kind": "powersgd"}, "PL"),
    "unknown key": (1, {"compress": {"blocks": 4}}, "PL"),
}


@pytest.mark.parametrize("name", list(REFUSALS))
def test_bad_settings_are_refused(ranks: Pool, name: str) -> None:
    nproc, options, code = REFUSALS[name]
    with pytest.raises(RankError, match=code) as raised:
        ranks.run(train, nproc=nproc, args=(1, 1, None, 0, options))
    assert all(isinstance(cause, PacelineError) for cause in raised.value.causes.values())


def test_another_codec_or_number_of_slots_is_refused(ranks: Pool, tmp_path: Path) -> None:
    ranks.run(train, args=(1, 2, str(tmp_path)))
    for options in ({"kind": "int4"}, {"compress": {"slots": 2}}, {"kind": "none"}):
        with pytest.raises(RankError, match=r"compress\.(kind|slots).*PL515"):
            ranks.run(train, args=(3, 4, str(tmp_path), 0, options))
    # Accepted: residuals of another codec are kept, those of another number of slots cannot be.
    accepted = {"accept": ["compress.kind"], "kind": "int4"}
    assert ranks.run(train, args=(3, 4, str(tmp_path), 0, accepted))[0][2]


def build_complex(world: Any) -> None:
    model = nn.Linear(40, 8)
    model.extra = nn.Parameter(torch.zeros(64, 64, dtype=torch.complex64))
    Trainer(
        model,
        loss=lambda output, batch: (output.square().sum(), len(output)),
        optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=1e-2),
        compress={"kind": "int8", "slots": 2},
    )


def train_with_numbers(world: Any) -> Tensor:
    """Train a model with a table of integers, which has no gradient."""
    model = nn.Linear(40, 8)
    model.table = nn.Parameter(torch.arange(64), requires_grad=False)
    trainer = Trainer(
        model,
        loss=lambda output, batch: (output.square().sum(), len(output)),
        optimizer=lambda named: torch.optim.SGD([p for _, p in named if p.requires_grad], lr=1e-2),
        compress={"kind": "int8", "slots": 2},
        microbatch_size=2,
    )
    trainer.step(next(iter(trainer.loader(SAMPLES, global_batch_size=16, shuffle=False))))
    return model.weight.detach().clone()


def test_parameters_of_integers_have_no_gradient_to_compress(ranks: Pool) -> None:
    weights = [ranks.run(train_with_numbers, nproc=nproc)[0] for nproc in (1, 2)]
    assert torch.equal(*weights)


def build_sparse(world: Any) -> None:
    Trainer(
        nn.Sequential(nn.EmbeddingBag(64, 64, sparse=True)),
        loss=lambda output, batch: (output.square().sum(), len(output)),
        optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=1e-2),
        compress={"kind": "int8", "slots": 2},
    )


@pytest.mark.parametrize(("build_bad", "code"), [(build_complex, "PL961"), (build_sparse, "PL425")])
def test_gradients_that_are_no_dense_floats_are_refused(ranks: Pool, build_bad: Any, code: str) -> None:
    with pytest.raises(RankError, match=code):
        ranks.run(build_bad, nproc=1)


def step_on_own_batches(world: Any) -> None:
    build().step(SAMPLES[: 8 if world.rank else 4])


def test_batches_that_do_not_fit_the_slots_are_refused(ranks: Pool) -> None:
    with pytest.raises(RankError, match=r"PL963"):
        ranks.run(step_on_own_batches)
