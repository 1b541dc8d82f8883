"""Ranks that differ: in settings, weights, state, gradients or samples. Each ends in one message, at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from paceline.errors import PacelineError
from paceline.parallel.replicate import Replica
from paceline.train.equal_copies import Copies, digest_tensor
from paceline.train.trainer import Trainer
from tests.dist.pool import Pool

AT = 3  # the step in which, or before which, something happens


def build(seed: int = 0, lr: float = 0.01, model: nn.Module | None = None, **settings: Any) -> Trainer:
    torch.manual_seed(0)
    model = model or nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))
    return Trainer(
        model,
        forward=lambda model, batch: model(batch[0]),
        loss=lambda output, batch: (output.square().sum(), len(output)),
        optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=lr),
        microbatch_size=2,
        seed=seed,
        **settings,
    )


def data(num_samples: int = 96, scale: float = 1.0) -> TensorDataset:
    return TensorDataset(scale * torch.randn(num_samples, 8, generator=torch.Generator().manual_seed(0)))


class NoisyData(Dataset[tuple[Tensor]]):
    """Samples that differ from read to read."""

    def __init__(self, rank: int) -> None:
        self._generator = torch.Generator().manual_seed(rank)

    def __len__(self) -> int:
        return 96

    def __getitem__(self, place: int) -> tuple[Tensor]:
        return (torch.randn(8, generator=self._generator),)


def end_of(
    trainer: Trainer, before_step: Any = None, samples: Dataset[Any] | None = None
) -> tuple[str, str, int]:
    """Return the code and text of the error, and the number of steps that were taken until then."""
    num_taken = 0
    try:
        for share in trainer.loader(samples or data(), global_batch_size=12):
            if before_step is not None:
                before_step(trainer, num_taken + 1)
            trainer.step(share)
            num_taken += 1
    except PacelineError as error:
        return error.code, str(error), num_taken
    return "", "", num_taken


def flip(tensor: Tensor, bit: int) -> None:
    tensor.detach().view(-1).view(torch.int32)[tensor.numel() // 3] ^= 1 << bit


def corrupt(world: Any, what: str, bit: int, odd_rank: int, settings: dict[str, Any]) -> tuple[str, str, int]:
    trainer = build(**settings)

    def before_step(trainer: Trainer, number: int) -> None:
        if number != AT or world.rank != odd_rank:
            return
        parameter = trainer.model.get_parameter("3.weight")
        if what == "weight":
            flip(parameter, bit)
        elif what == "buffer":
            flip(trainer.model.get_buffer("1.running_var"), bit)
        else:
            flip(trainer._updates["model"].optimizer.state[parameter][what], bit)

    if what == "gradient":
        reduce = Replica._reduce

        def flip_reduced(replica: Replica, *args: Any, **settings: Any) -> float:
            waited_s = reduce(replica, *args, **settings)
            parameter = trainer.model.get_parameter("3.weight")
            if trainer.step_number == AT and world.rank == odd_rank and parameter.grad is not None:
                flip(parameter.grad, bit)
            return waited_s

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Replica, "_reduce", flip_reduced)
            return end_of(trainer)
    return end_of(trainer, before_step)


# A weight is seen in the step that starts from it, a quarter of the state per step.
@pytest.mark.parametrize(
    ("what", "bit", "latest", "named"),
    [
        ("weight", 0, AT - 1, "3.weight"),
        ("weight", 30, AT - 1, "3.weight"),
        ("buffer", 3, AT - 1, "1.running_var"),
        ("exp_avg", 22, AT, "exp_avg of 3.weight"),
        ("exp_avg_sq", 0, AT + 2, "exp_avg_sq of 3.weight"),
        ("gradient", 27, AT, "3.weight"),
    ],
)
@pytest.mark.parametrize("reduction", ["exact", "fast"])
def test_a_flipped_bit_ends_the_run(
    ranks: Pool, what: str, bit: int, latest: int, named: str, reduction: str
) -> None:
    found = ranks.run(corrupt, args=(what, bit, 1, {"reduction": reduction}))
    assert found[0] == found[1], "one message, the same on all ranks"
    code, text, num_taken = found[0]
    assert code == "PL418"
    assert AT - 1 <= num_taken <= latest
    assert f"{named} differs between rank 0 and rank 1" in text


@pytest.mark.parametrize("odd_rank", [0, 2])
def test_of_three_ranks_the_odd_one_is_named(ranks: Pool, odd_rank: int) -> None:
    others = " and ".join(str(rank) for rank in range(3) if rank != odd_rank)
    for code, text, num_taken in ranks.run(corrupt, nproc=3, args=("weight", 5, odd_rank, {})):
        assert (code, num_taken) == ("PL418", AT - 1)
        assert f"3.weight on rank {odd_rank} differs from ranks {others}" in text


@pytest.mark.parametrize("layout", ["dp_replicate=2 dp_shard=2", "dp_replicate=2 tp=2"])
def test_copies_of_parts_are_compared_with_their_own_kind(ranks: Pool, layout: str) -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.Linear(16, 2))
    settings = {"layout": layout, "model": model, "example": (torch.ones(2, 8),)}
    for code, _, num_taken in ranks.run(corrupt, nproc=4, args=("none", 0, 9, settings)):
        assert (code, num_taken) == ("", 8), "no false alarm"
    if "dp_shard" in layout:
        return
    for code, text, num_taken in ranks.run(corrupt, nproc=4, args=("weight", 5, 3, settings)):
        assert (code, num_taken) == ("PL418", AT - 1)
        assert "3.weight" in text
        assert "rank 3" in text


def other_settings(world: Any, what: str) -> tuple[str, str, int]:
    mine, is_odd = world.rank, world.rank == 1
    try:
        if what == "lr":
            return end_of(build(lr=0.01 * (1 + is_odd)))
        if what == "seed":
            return end_of(build(seed=mine))
        if what == "clip_norm":
            return end_of(build(clip_norm=0.5 + is_odd))
        if what == "dtype":
            return end_of(build(dtype="bf16" if is_odd else "fp32"))
        if what == "eps":
            return end_of(
                build(model=nn.Sequential(nn.Linear(8, 4), nn.LayerNorm(4, eps=1e-5 * (1 + is_odd))))
            )
        if what == "shape":
            return end_of(build(model=nn.Linear(8, 4 + is_odd)))
        if what == "size of the data":
            return end_of(build(), samples=data(96 + 12 * is_odd))
        if what == "content of the data":
            return end_of(build(), samples=data(scale=1.0 + is_odd))
        if what == "noise in the data":
            return end_of(build(), samples=NoisyData(mine))
        if what == "hook":
            trainer = build()
            if is_odd:
                trainer.on_gradients(lambda named: None)
            return end_of(trainer)
        if what == "lr later":
            return end_of(build(), _change_lr if is_odd else None)
        assert what == "work of a hook"
        trainer = build()
        trainer.on_gradients(lambda named: [g.mul_(1 + is_odd) for g in named.values()])  # type: ignore[arg-type, func-returns-value]
        return end_of(trainer)
    except PacelineError as error:
        return error.code, str(error), 0


def _change_lr(trainer: Trainer, number: int) -> None:
    if number == AT:
        trainer._updates["model"].optimizer.param_groups[0]["lr"] = 0.5


@pytest.mark.parametrize(
    ("what", "code", "taken", "shown"),
    [
        ("lr", "PL417", 0, "lr of group 0 of model is 0.01 on rank 0, 0.02 on rank 1"),
        ("seed", "PL417", 0, "seed is 0 on rank 0, 1 on rank 1"),
        ("clip_norm", "PL417", 0, "clip_norm is 0.5 on rank 0, 1.5 on rank 1"),
        ("dtype", "PL417", 0, "dtype is fp32 on rank 0, bf16 on rank 1"),
        ("eps", "PL417", 0, "eps=1e-05"),
        ("shape", "PL417", 0, "parameter weight of model is trained [4, 8]"),
        ("size of the data", "PL668", 0, "num_samples of loader0 is 96 on rank 0, 108 on rank 1"),
        ("content of the data", "PL668", 0, "content of loader0 is "),
        ("noise in the data", "", 8, ""),
        ("hook", "PL417", 0, "on_gradients of model"),
        ("lr later", "PL417", AT - 1, "lr of group 0 of model is 0.01 on rank 0, 0.5 on rank 1"),
        ("work of a hook", "PL418", 1, "0.weight differs between rank 0 and rank 1"),
    ],
)
def test_other_settings_are_named(ranks: Pool, what: str, code: str, taken: int, shown: str) -> None:
    for found in ranks.run(other_settings, args=(what,)):
        assert found[0] == code, found
        assert found[2] == taken
        assert shown in found[1]


def saved_apart(world: Any, folder: str, kind: str) -> tuple[str, str, bool]:
    """Flip a bit of rank 1's optimizer state right before a save; return what raises, and where."""
    behind = {"checkpoint_mode": "sharded", "asynchronous_saves": True} if kind != "now" else {}
    trainer = build(**behind)
    trainer.resume(folder)
    shares = iter(trainer.loader(data(), global_batch_size=12))
    trainer.step(next(shares))
    trainer.save(wait=True)
    trainer.step(next(shares))
    if world.rank == 1:
        flip(trainer._updates["model"].optimizer.state[trainer.model.get_parameter("0.bias")]["exp_avg"], 0)
    is_saved = False
    try:
        handle = trainer.save()
        is_saved = True
        if kind == "next save":
            with pytest.MonkeyPatch.context() as patch:  # the steps' own check comes first otherwise
                patch.setattr(Copies, "check", lambda self, digests: None)
                trainer.step(next(shares))
                trainer.save()
        handle.wait()
    except PacelineError as error:
        return error.code, str(error), is_saved
    finally:
        trainer.close()
    return "", "saved", is_saved


@pytest.mark.parametrize("kind", ["now", "wait", "next save"])
def test_what_differs_is_not_saved(ranks: Pool, tmp_path: Path, kind: str) -> None:
    for code, text, is_saved in ranks.run(saved_apart, 3, args=(str(tmp_path), kind)):
        assert code == "PL418"
        assert "exp_avg of 0.bias on rank 1 differs from ranks 0 and 2" in text
        assert is_saved == (kind != "now"), "an asynchronous save compares while training goes on"
    left = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert left == [".lock", "step-00000001"]


def held_under(world: Any, layout: str) -> list[tuple[tuple[int, ...], list[str]]]:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.Linear(16, 2))
    trainer = build(model=model, layout=layout, example=(torch.ones(2, 8),))
    trainer.step(next(iter(trainer.loader(data(), global_batch_size=12))))
    held = trainer._updates["model"].copies.hold()
    assert held.read()
    return [
        (tuple(group["ranks"]), sorted(group["digests"]))
        for model in held.describe()
        for group in model["groups"]
    ]


def test_only_what_others_hold_too_is_read(ranks: Pool) -> None:
    assert ranks.run(held_under, args=("dp_shard=2",)) == [[], []]
    for found in ranks.run(held_under, args=("dp_replicate=2",)):
        ((members, names),) = found
        assert members == (0, 1)
        assert len(names) == 6 * 4, "weights, two moments and a counter of each"
    for found in ranks.run(held_under, args=("tp=2",)):
        ((members, names),) = found
        assert members == (0, 1)
        assert 0 < len(names) < 6 * 4, "not what tp divides"


def gone_apart(world: Any) -> tuple[str, str, int]:
    trainer = build()
    with trainer.without_communication():
        trainer.step((torch.randn(4, 8) + world.rank,))
    return end_of(trainer)


def test_ranks_that_went_apart_on_purpose_are_none_of_ours(ranks: Pool) -> None:
    assert ranks.run(gone_apart) == [("", "", 8)] * 2


def doubled(world: Any, kind: str) -> tuple[str, str, int]:
    trainer, num_taken = build(), 0
    torch.manual_seed(3)
    loader: Any = DataLoader(data(), batch_size=6, shuffle=kind == "shuffled")
    if kind == "one batch to measure with":
        loader = [next(iter(loader))] * 8
    elif kind == "little in it":
        loader = [(torch.ones(2, 8) * (number % 4),) for number in range(8)]
    elif kind == "own":
        torch.manual_seed(world.rank)
        loader = DataLoader(data(), batch_size=6, shuffle=True)
    try:
        for batch in loader:
            trainer.step(batch)
            num_taken += 1
    except PacelineError as error:
        return error.code, str(error), num_taken
    return "", "", num_taken


@pytest.mark.parametrize("kind", ["in order", "shuffled"])
def test_the_same_loader_on_two_ranks_is_reported(ranks: Pool, kind: str) -> None:
    for code, text, num_taken in ranks.run(doubled, args=(kind,)):
        assert (code, num_taken) == ("PL419", 2)
        assert "DistributedSampler" in text


@pytest.mark.parametrize("kind", ["one batch to measure with", "little in it", "own"])
def test_equal_batches_that_may_be_meant_are_none_of_ours(ranks: Pool, kind: str) -> None:
    for code, _, num_taken in ranks.run(doubled, args=(kind,)):
        assert code == ""
        assert num_taken >= 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.bool, torch.complex64])
@pytest.mark.parametrize("shape", [(), (3,), (7, 5), (40, 1000), (300, 301)])
def test_any_changed_number_changes_the_digest(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = (torch.randn(shape, dtype=torch.float64) * 3).to(dtype)
    before = digest_tensor(tensor)
    for place in {0, tensor.numel() // 2, tensor.numel() - 1}:
        flat = tensor.reshape(-1).view(torch.uint8)
        at = place * tensor.element_size()
        flat[at] ^= 1
        assert digest_tensor(tensor) != before
        flat[at] ^= 1
    assert digest_tensor(tensor) == before


def test_a_digest_does_not_depend_on_the_place_in_memory() -> None:
    tensor = torch.randn(4, 6, 5, 7)
    strided, shifted = (
        tensor.contiguous(memory_format=torch.channels_last),
        torch.empty(841)[1:].view(4, 6, 5, 7),
    )
    shifted.copy_(tensor)
    assert digest_tensor(strided) == digest_tensor(shifted) == digest_tensor(tensor)


def test_a_digest_changes_if_rows_are_swapped() -> None:
    tensor = torch.randn(64, 1024)
    rows = tensor.clone()
    rows[[3, 40]] = tensor[[40, 3]]
    assert digest_tensor(rows) != digest_tensor(tensor)
