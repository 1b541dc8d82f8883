"""Every setting of `[ddp]` does what it says, and none changes the result."""

from __future__ import annotations

import gc
import weakref
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset, TensorDataset

from paceline.errors import PacelineError
from paceline.parallel import replicate
from paceline.parallel.replicate import sum_bucket
from paceline.train.loop import Loop
from paceline.train.trainer import Trainer
from tests.dist.pool import Pool, RankError
from tests.train.cases import (
    Trained,
    assert_ranks_agree,
    assert_same_run,
    take_steps,
)

NUM_STEPS = 6


def build_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(12, 64), nn.Tanh(), nn.Dropout(0.2), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 3)
    )


def data(num_samples: int) -> TensorDataset:
    return TensorDataset(torch.randn(num_samples, 12, generator=torch.Generator().manual_seed(0)))


def build_trainer(model: nn.Module | None = None, **settings: Any) -> Trainer:
    return Trainer(
        model or build_model(),
        forward=lambda model, batch: model(batch[0]),
        loss=lambda output, batch: ((output - 1).square().sum(), len(output)),
        optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=0.01, weight_decay=0.1),
        microbatch_size=2,
        **{"dtype": "fp64", "reduction": "fast", **settings},
    )


def train(world: Any, global_batch_size: int, settings: dict[str, Any]) -> Trained:
    """Over the ragged end of an epoch."""
    trainer = build_trainer(**settings)
    loader = trainer.loader(data(3 * global_batch_size + 1), global_batch_size=global_batch_size)
    return take_steps(trainer, loader, NUM_STEPS)


def train_several(world: Any, sizes: list[int], settings: dict[str, Any]) -> list[Trained]:
    return [train(world, size, settings) for size in sizes]


@pytest.fixture(scope="module")
def one_process(ranks: Pool) -> dict[int, Trained]:
    """By global batch size, what one rank makes of it."""
    sizes = [2, 4, 6, 8]
    return dict(zip(sizes, ranks.run(train_several, nproc=1, args=(sizes, {}))[0], strict=True))


def buckets_and_views(world: Any, ddp: dict[str, Any]) -> Any:
    """Bucket sizes of a later step, the number of storages that gradients lie in, and the result."""
    sizes: list[int] = []

    def watch(bucket: Any, group: Any) -> Any:
        sizes.append(bucket.buffer().numel())
        return sum_bucket(bucket, group)

    trainer = build_trainer(ddp=ddp)
    storages: list[int] = []

    def look(gradients: dict[str, Tensor]) -> None:
        storages[:] = [len({g.untyped_storage().data_ptr() for g in gradients.values()})]

    trainer.on_gradients(look)
    loader = trainer.loader(data(25), global_batch_size=8)
    trained = Trained()
    with mock.patch.object(replicate, "sum_bucket", watch):
        for share in loader:
            sizes.clear()
            trained.losses.append(trainer.step(share).loss)
    return list(sizes), storages[0], trained.finish(trainer)


def test_bucket_cap_mb_sets_the_number_of_buckets(ranks: Pool) -> None:
    (one, _, plain), _ = ranks.run(buckets_and_views, args=({"bucket_cap_mb": 25.0},))
    (many, _, same), _ = ranks.run(buckets_and_views, args=({"bucket_cap_mb": 0.001},))
    assert len(one) == 1
    assert len(many) > 2
    assert sum(many) == sum(one)
    # Which ranges are reduced together changes no sum of two numbers.
    assert plain.hash == same.hash


def test_gradient_as_bucket_view_saves_a_copy(ranks: Pool) -> None:
    (_, views, one), _ = ranks.run(buckets_and_views, args=({"gradient_as_bucket_view": True},))
    (_, copies, other), _ = ranks.run(buckets_and_views, args=({"gradient_as_bucket_view": False},))
    assert views == 1
    assert copies == len(list(build_model().parameters()))
    assert one.hash == other.hash


@pytest.mark.parametrize(
    "ddp",
    [
        {"find_unused_parameters": True},
        {"find_unused_parameters": True, "bucket_cap_mb": 0.01, "gradient_as_bucket_view": False},
    ],
    ids=lambda ddp: "+".join(f"{key}={value}" for key, value in ddp.items()),
)
def test_settings_change_speed_alone(
    ranks: Pool, one_process: dict[int, Trained], ddp: dict[str, Any]
) -> None:
    # Accumulation, one microbatch each, and a rank with nothing; more microbatches on some ranks.
    for nproc, sizes in ((2, [8, 4, 2]), (3, [8]), (4, [6])):
        results = ranks.run(train_several, nproc=nproc, args=(sizes, {"ddp": ddp}))
        for number, size in enumerate(sizes):
            assert_ranks_agree([result[number] for result in results])
            assert_same_run(one_process[size], results[0][number], losses=1e-12, tensors=1e-12)


# ---- buffers


class Buffers(nn.Module):
    """Buffers of kinds that models have, different on every rank before the trainer sees them."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 3).to(memory_format=torch.contiguous_format)
        self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.fill_(rank)
        self.register_buffer("mask", torch.ones(3, 3, dtype=torch.bool).triu(rank))
        self.register_buffer("ids", torch.full((1, 5), rank), persistent=False)
        self.register_buffer("turns", torch.full((4,), 1 + rank * 1j, dtype=torch.complex64))
        self.register_buffer("low", torch.full((3,), rank, dtype=torch.bfloat16))
        self.register_buffer("scale", torch.tensor(float(rank)))
        self.register_buffer("wide", torch.full((2, 3), float(rank)).t())
        self.register_buffer("empty", torch.zeros(0))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.conv(x[:, :, None, None].expand(-1, -1, 12, 12)[:, :3]).mean()


def aligned(world: Any, frozen: bool) -> list[list[float]]:
    model = Buffers(world.rank)
    if frozen:
        models = {"student": nn.Linear(12, 3), "teacher": model}
        Trainer(
            models,
            optimizer={"student": lambda named: torch.optim.SGD([p for _, p in named], lr=0.1)},
            step=lambda update: None,
        )
    else:
        build_trainer(model, dtype="fp32")
    tensors = [*model.parameters(), *model.buffers()]
    return [
        torch.view_as_real(t).flatten().tolist() if t.is_complex() else t.flatten().tolist() for t in tensors
    ]


@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen teacher"])
def test_all_ranks_begin_with_rank_0s_parameters_and_buffers(ranks: Pool, frozen: bool) -> None:
    first, second = ranks.run(aligned, args=(frozen,))
    assert first == second
    assert first[-1] == []


# ---- parameters that a step doesn't use


class Branches(nn.Module):
    """A sample goes through the branch that its first feature names; the last branch is never taken."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.branches = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor, branch: Tensor) -> Tensor:
        chosen = [self.branches[int(b)](row) for row, b in zip(x, branch, strict=True)]
        return self.head(torch.stack(chosen))


class Routed(Dataset[dict[str, Tensor]]):
    """Batches of 8 in microbatches of 2: all take branch 0 but those written here."""

    branch = torch.tensor(
        [
            *(0, 0, 0, 0, 0, 0, 1, 1),  # branch 1 on the last microbatch, 2 and 3 nowhere
            *(2, 2, 0, 0, 0, 0, 0, 0),  # branch 2 on the first
            *(1, 1, 1, 1, 1, 1, 1, 1),  # branch 0 nowhere
            *(0, 0, 2, 1, 0, 0, 0, 0),
            *(0, 0),  # one microbatch: nothing for the second rank
        ]
    )

    def __len__(self) -> int:
        return len(self.branch)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        x = torch.randn(4, generator=torch.Generator().manual_seed(index))
        return {"x": x, "branch": self.branch[index]}


def train_branches(world: Any, ddp: dict[str, bool], num_steps: int = 10) -> Trained:
    trainer = Trainer(
        Branches(),
        loss=lambda output, batch: ((output - 1).square().sum(), len(output)),
        optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=0.1, weight_decay=0.5),
        microbatch_size=2,
        dtype="fp64",
        ddp=ddp,
    )
    without: list[list[str]] = []

    def look(gradients: dict[str, Tensor]) -> None:
        without.append([n for n, _ in trainer.model.named_parameters() if n not in gradients])

    trainer.on_gradients(look)
    loader = trainer.loader(Routed(), global_batch_size=8, shuffle=False)
    trained = take_steps(trainer, loader, num_steps)
    trained.extra = without
    return trained


@pytest.mark.parametrize("view", [True, False])
@pytest.mark.parametrize("search", [True, False])
@pytest.mark.parametrize("nproc", [1, 2, 3, 4])
def test_unused_parameters_are_left_alone_as_in_one_process(
    ranks: Pool, nproc: int, search: bool, view: bool
) -> None:
    plain = ranks.run(train_branches, nproc=1, args=({},))[0]
    ddp = {"find_unused_parameters": search, "gradient_as_bucket_view": view}
    results = ranks.run(train_branches, nproc=nproc, args=(ddp,))
    assert_ranks_agree(results)
    assert_same_run(plain, results[0], losses=1e-12, tensors=1e-12)
    for trained in results:
        assert trained.extra == plain.extra
    unused = [{name.split(".")[1] for name in names} for names in plain.extra[:5]]
    assert unused == [{"2", "3"}, {"1", "3"}, {"0", "2", "3"}, {"3"}, {"1", "2", "3"}]
    # No gradient, hence no weight decay either.
    first = Branches().double().state_dict()["branches.3.weight"]
    assert torch.equal(results[0].tensors["model.branches.3.weight"], first)


class OneRank(nn.Module):
    """The second rank's microbatch doesn't use one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.common, self.rare = nn.Linear(12, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        output = self.common(x)
        return self.rare(output) if dist.get_rank() == 0 else output


def train_one_rank(world: Any, ddp: dict[str, Any]) -> list[float]:
    trainer = build_trainer(OneRank(), ddp=ddp)
    return [trainer.step(share).loss for share in trainer.loader(data(8), global_batch_size=4)]


def test_one_rank_may_leave_a_parameter_out(ranks: Pool) -> None:
    plain, searched = (
        ranks.run(train_one_rank, args=(ddp,)) for ddp in ({}, {"find_unused_parameters": True})
    )
    assert plain == searched


def train_nothing(world: Any) -> None:
    model = build_model()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    build_trainer(model)


def test_a_model_with_nothing_to_train_is_refused(ranks: Pool) -> None:
    for nproc in (1, 2):
        with pytest.raises(RankError) as caught:
            ranks.run(train_nothing, nproc=nproc)
        for error in caught.value.causes.values():
            assert isinstance(error, PacelineError)
            assert error.code == "PL420"
            assert "none of the 6 parameters of Sequential" in str(error)


def train_and_let_go(world: Any, layout: str, settings: dict[str, Any]) -> tuple[bool, bool]:
    """Return whether the models of a trainer and of a loop are free once these are closed."""
    trainer = build_trainer(layout=layout, **settings)
    for share in trainer.loader(data(8), global_batch_size=4):
        trainer.step(share)
    model = build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loop = Loop(model, optimizer, layout=layout, microbatch_size=2, **settings)
    for step in loop.loader(data(8), global_batch_size=4):
        for (x,) in step:
            step.backward(loop.model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    held = weakref.ref(trainer.model), weakref.ref(loop.model)
    trainer.close()
    loop.close()
    del trainer, loop, model, optimizer, share, step, x
    gc.collect()
    return held[0]() is None, held[1]() is None


def count_modules_of_ddp(world: Any) -> int:
    gc.collect()
    return sum(isinstance(each, DistributedDataParallel) for each in gc.get_objects())


@pytest.mark.parametrize("reduction", ["fast", "exact"])
@pytest.mark.parametrize("layout", ["dp_replicate=2", "dp_shard=2"])
def test_a_model_is_free_when_its_trainer_is_closed(ranks: Pool, layout: str, reduction: str) -> None:
    """DDP holds on to hooks where Python does not find a circle."""
    found = ranks.run(train_and_let_go, args=(layout, {"reduction": reduction}))
    assert found == [(True, True)] * 2


def test_a_world_that_is_closed_keeps_no_model(ranks: Pool) -> None:
    before = ranks.run(count_modules_of_ddp)
    ranks.run(train, args=(4, {}))
    assert ranks.run(count_modules_of_ddp) == before
