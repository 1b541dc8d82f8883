"""One mistake per design, with the code that it must get and a part of the line that must be named."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional
from torch.utils.data import DataLoader, IterableDataset, random_split

from tests.watch.sentinels.parts import (
    NUM,
    SIZE,
    Design,
    average_gradients,
    ddp,
    fully_sharded,
    loss_of,
    make_data,
    mlp,
    rank,
    sgd,
    sharded,
    train,
    world,
)


def two_epochs() -> Iterator[Any]:
    """Yield the batches of two epochs, as loaders give them."""
    sampler, loader = sharded()
    for epoch in range(2):
        sampler.set_epoch(epoch)
        yield from loader


PLANTED: dict[str, tuple[Design, str, str]] = {}


def planted(code: str, line: str) -> Callable[[Design], Design]:
    def register(design: Design) -> Design:
        PLANTED[design.__name__] = design, code, line
        return design

    return register


@planted("PL030", "loss_of(model, x, y).backward()")
def never_cleared() -> None:
    model = ddp()
    optimizer = sgd(model, 0.001)
    _, loader = sharded()
    for x, y in [*loader] * 2:
        loss_of(model, x, y).backward()
        optimizer.step()


@planted("PL030", "loss_of(model, x, y).backward()")
def never_cleared_alone() -> None:
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters())
    _, loader = sharded()
    for x, y in [*loader] * 2:
        loss_of(model, x, y).backward()
        average_gradients(model)
        optimizer.step()


@planted("PL030", "loss_of(model, x, y).backward()")
def never_cleared_under_shards() -> None:
    model = fully_sharded()
    optimizer = sgd(model, 0.001)
    for x, y in two_epochs():
        loss_of(model, x, y).backward()
        optimizer.step()


@planted("PL030", "loss_of(model, x, y).backward()")
def never_cleared_in_a_tensor_group() -> None:
    mesh = init_device_mesh("cpu", (world(),))
    model = parallelize_module(mlp(16), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    optimizer = sgd(model, 0.001)
    for x, y in DataLoader(make_data(), batch_size=SIZE):
        loss_of(model, x, y).backward()
        optimizer.step()


@planted("PL031", "loss_of(model, x, y).backward()")
def not_divided_under_shards() -> None:
    model = fully_sharded()
    optimizer = sgd(model, 0.001)
    for i, (x, y) in enumerate(two_epochs()):
        loss_of(model, x, y).backward()
        if i % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()


@planted("PL030", "loss_of(model, x, y).backward()")
def other_model_cleared() -> None:
    model, other = ddp(), mlp()
    optimizer = sgd(model, 0.001)
    _, loader = sharded()
    for x, y in [*loader] * 2:
        other.zero_grad()
        loss_of(model, x, y).backward()
        optimizer.step()


@planted("PL030", "(loss_of(model, x, y) / 4).backward()")
def cleared_once_an_epoch() -> None:
    model = ddp()
    optimizer = sgd(model, 0.001)
    batches = [*sharded()[1]] * 2
    for _ in range(2):
        optimizer.zero_grad()
        for i, (x, y) in enumerate(batches):
            (loss_of(model, x, y) / 4).backward()
            if i % 4 == 3:
                optimizer.step()


@planted("PL031", "loss_of(model, x, y).backward()")
def not_divided() -> None:
    model = ddp()
    optimizer = sgd(model, 0.001)
    sampler, loader = sharded()
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for i, (x, y) in enumerate(loader):
            loss_of(model, x, y).backward()
            if i % 5 == 4:
                optimizer.step()
                optimizer.zero_grad()
        optimizer.zero_grad()


@planted("PL835", "(loss_of(model, x, y) / 4).backward()")
def cleared_in_each_round() -> None:
    model = ddp()
    optimizer = sgd(model)
    for i, (x, y) in enumerate(two_epochs()):
        optimizer.zero_grad()
        (loss_of(model, x, y) / 4).backward()
        if i % 4 == 3:
            optimizer.step()


@planted("PL836", "(loss_of(model, x, y) / 4).backward()")
def rest_of_an_epoch() -> None:
    model = ddp()
    optimizer = sgd(model)
    sampler, loader = sharded()
    for epoch in range(3):
        sampler.set_epoch(epoch)
        optimizer.zero_grad()
        for i, (x, y) in enumerate(loader):
            (loss_of(model, x, y) / 4).backward()
            if i % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()


@planted("PL829", "(loss_of(model, x, y) / 4).backward()")
def first_exchanged() -> None:
    model = ddp()
    optimizer = sgd(model)
    _, loader = sharded()
    for i, (x, y) in enumerate([*loader] * 3):
        with contextlib.nullcontext() if i % 4 == 0 else model.no_sync():
            (loss_of(model, x, y) / 4).backward()
        if i % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()


@planted("PL825", "optimizer.step()")
def lr_of_rank() -> None:
    model = ddp()
    train(model, sgd(model, 0.01 * (rank() + 1)))


@planted("PL825", "optimizer.step()")
def weight_decay_of_rank() -> None:
    model = ddp()
    train(model, torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.5 * rank()))


@planted("PL825", "optimizer.step()")
def lr_by_own_loss() -> None:
    """A scheduler that follows each rank's own loss."""
    model = ddp()
    optimizer = sgd(model)

    def after(number: int) -> None:
        optimizer.param_groups[0]["lr"] = 0.05 / (1 + number * rank())

    train(model, optimizer, after=after)


@planted("PL825", "optimizer.step()")
def lr_of_rank_by_hand() -> None:
    model = mlp()
    optimizer = sgd(model, 0.01 * (rank() + 1))
    _, loader = sharded()
    for x, y in [*loader] * 2:
        optimizer.zero_grad()
        loss_of(model, x, y).backward()
        average_gradients(model)
        optimizer.step()


@planted("PL013", "optimizer.step()")
def step_on_rank_0() -> None:
    model = ddp()
    optimizer = sgd(model)
    _, loader = sharded()
    for x, y in [*loader] * 2:
        optimizer.zero_grad()
        loss_of(model, x, y).backward()
        if rank() == 0:
            optimizer.step()


@planted("PL013", "grad_scaler.step(optimizer)")
def scaler_on_rank_0() -> None:
    model = ddp()
    optimizer = sgd(model)
    grad_scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    _, loader = sharded()
    for x, y in [*loader] * 2:
        optimizer.zero_grad()
        grad_scaler.scale(loss_of(model, x, y)).backward()
        if rank() == 0:
            grad_scaler.step(optimizer)
            grad_scaler.update()


@planted("PL826", "optimizer.step()")
def weights_by_own_seed() -> None:
    """Gradients are averaged by hand, and nobody has sent the first weights."""
    model = mlp(seed=rank())
    optimizer = sgd(model)
    _, loader = sharded()
    for x, y in [*loader] * 2:
        optimizer.zero_grad()
        loss_of(model, x, y).backward()
        average_gradients(model)
        optimizer.step()


@planted("PL826", "optimizer.step()")
def loaded_on_rank_0() -> None:
    model = ddp()
    if rank() == 0:
        model.module.load_state_dict(mlp(seed=7).state_dict())
    train(model, sgd(model))


@planted("PL827", ".backward()")
def hook_sums() -> None:
    model = ddp()

    def add(state, bucket):  # type: ignore[no-untyped-def]  # DDP checks annotations
        work = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
        return work.then(lambda done: done.value()[0])

    model.register_comm_hook(None, add)
    train(model, sgd(model))


@planted("PL827", ".backward()")
def hook_sums_in_half() -> None:
    model = ddp()

    def add(state, bucket):  # type: ignore[no-untyped-def]
        work = dist.all_reduce(bucket.buffer().to(torch.bfloat16), async_op=True).get_future()
        return work.then(lambda done: bucket.buffer().copy_(done.value()[0]))

    model.register_comm_hook(None, add)
    train(model, sgd(model))


@planted("PL828", "")
def sizes_of_rank() -> None:
    num = 24 if rank() == 0 else 8
    own = torch.Generator().manual_seed(rank())
    batches = [(torch.randn(num, 16, generator=own), torch.randint(0, 10, (num,))) for _ in range(20)]
    model = ddp()
    train(model, sgd(model), loader=batches)


@planted("PL831", "optimizer.step()")
def not_wrapped() -> None:
    model = mlp()
    train(model, sgd(model))


@planted("PL831", "optimizer.step()")
def not_wrapped_with_log() -> None:
    model = mlp()

    def after(number: int) -> None:
        dist.all_reduce(torch.ones(1))

    train(model, sgd(model), after=after)


@planted("PL831", "")
def never_exchanged() -> None:
    model = ddp()
    optimizer = sgd(model)
    _, loader = sharded()
    for x, y in [*loader] * 2:
        with model.no_sync():
            optimizer.zero_grad()
            loss_of(model, x, y).backward()
            optimizer.step()


@planted("PL831", "optimizer.step()")
def wrapper_bypassed() -> None:
    model = ddp()
    train(model.module, sgd(model))


@planted("PL020", "functional.cross_entropy(model(x), y)")
def no_sampler() -> None:
    model = ddp()
    train(model, sgd(model), loader=DataLoader(make_data(), batch_size=SIZE))


@planted("PL020", "functional.cross_entropy(model(x), y)")
def own_shuffle() -> None:
    own = torch.Generator().manual_seed(100 + rank())
    model = ddp()
    train(model, sgd(model), loader=DataLoader(make_data(640), batch_size=SIZE, shuffle=True, generator=own))


@planted("PL020", "functional.cross_entropy(model(x), y)")
def whole_stream() -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            g = torch.Generator().manual_seed(5)
            for _ in range(NUM):
                yield torch.randn(16, generator=g), torch.randint(0, 10, (), generator=g)

    model = ddp()
    train(model, sgd(model), loader=DataLoader(Stream(), batch_size=SIZE))


@planted("PL020", "functional.cross_entropy(model(x), y)")
def no_sampler_under_shards() -> None:
    model = fully_sharded()
    train(model, sgd(model), loader=DataLoader(make_data(), batch_size=SIZE, shuffle=True))


@planted("PL059", "functional.cross_entropy(model(x), y)")
def split_by_seed() -> None:
    from torch.utils.data import DistributedSampler

    own = torch.Generator().manual_seed(100 + rank())
    part, _ = random_split(make_data(640), [512, 128], generator=own)
    sampler: Any = DistributedSampler(part)
    model = ddp()
    train(model, sgd(model), loader=DataLoader(part, batch_size=SIZE, sampler=sampler), epochs=1)


@planted("PL020", "")
def slices_of_a_tensor() -> None:
    """No loader at all."""
    x, y = make_data().tensors
    model = ddp()
    batches = [(x[n : n + SIZE], y[n : n + SIZE]) for n in range(0, NUM, SIZE)]
    train(model, sgd(model), loader=batches)


@planted("PL024", "for x, y in")
def same_order() -> None:
    _, loader = sharded()
    model = ddp()
    train(model, sgd(model), loader=loader)


@planted("PL041", "torch.save(model.module.state_dict(), 'all.pt')")
def one_file() -> None:
    model = ddp()

    def after(number: int) -> None:
        if number % 10 == 0:
            torch.save(model.module.state_dict(), 'all.pt')  # fmt: skip

    train(model, sgd(model), after=after)


@planted("PL042", "torch.load('half.pt')")
def load_races_save() -> None:
    model = ddp()
    train(model, sgd(model), epochs=1)
    if rank() == 0:
        torch.save(model.module.state_dict(), "half.pt")
    else:
        with contextlib.suppress(Exception):
            torch.load('half.pt')  # fmt: skip


@planted("PL830", "torch.set_rng_state(kept)")
def one_random_state() -> None:
    torch.manual_seed(7 + rank())
    kept = torch.get_rng_state()
    dist.broadcast(kept, 0)
    torch.set_rng_state(kept)


# ---- the same mistakes in other clothes

FIRST = [*PLANTED]


def accumulate(
    model: nn.Module, optimizer: torch.optim.Optimizer, *, every: int = 4, exchanged: tuple[int, ...] = ()
) -> Iterator[tuple[int, Tensor]]:
    """Yield the number of a pass and its loss, which is not divided; all but the `exchanged` are no_sync."""
    for i, (x, y) in enumerate(two_epochs()):
        alone = exchanged and i % every not in exchanged
        with model.no_sync() if alone else contextlib.nullcontext():  # type: ignore[operator]
            yield i, loss_of(model, x, y)
        if i % every == every - 1:
            optimizer.step()
            optimizer.zero_grad()


@planted("PL030", "loss_of(model, x, y).backward()")
def never_cleared_but_clipped() -> None:
    model = ddp()
    optimizer = torch.optim.AdamW(model.parameters())
    for x, y in two_epochs():
        loss_of(model, x, y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


@planted("PL030", "scaler.scale(loss_of(model, x, y)).backward()")
def never_cleared_with_a_scaler() -> None:
    model, scaler = ddp(), torch.amp.GradScaler("cpu", init_scale=2.0)
    optimizer = sgd(model, 0.001)
    for x, y in two_epochs():
        scaler.scale(loss_of(model, x, y)).backward()
        scaler.step(optimizer)
        scaler.update()


@planted("PL030", "loss_of(critic, x, y).backward()")
def critic_never_cleared() -> None:
    model, critic = ddp(), ddp()
    optimizer, other = sgd(model, 0.001), sgd(critic, 0.001)
    for x, y in two_epochs():
        optimizer.zero_grad()
        loss_of(model, x, y).backward()
        optimizer.step()
        loss_of(critic, x, y).backward()
        other.step()


@planted("PL031", "loss.backward()")
def not_divided_and_exchanged_once() -> None:
    model = ddp()
    optimizer = sgd(model, 0.001)
    for _, loss in accumulate(model, optimizer, exchanged=(3,)):
        loss.backward()


@planted("PL031", "functional.mse_loss(model(x), model(x).detach() + 1).backward()")
def other_loss_not_divided() -> None:
    model = ddp()
    optimizer = torch.optim.AdamW(model.parameters())
    for i, (x, _) in enumerate(two_epochs()):
        functional.mse_loss(model(x), model(x).detach() + 1).backward()
        if i % 2 == 1:
            optimizer.step()
            optimizer.zero_grad()


@planted("PL835", "(loss_of(model, x, y) / 2).backward()")
def model_cleared_in_each_round() -> None:
    model = ddp()
    optimizer = torch.optim.AdamW(model.parameters())
    for i, (x, y) in enumerate(two_epochs()):
        model.zero_grad(set_to_none=False)
        (loss_of(model, x, y) / 2).backward()
        if i % 2 == 1:
            optimizer.step()


@planted("PL829", "(loss / 4).backward()")
def second_exchanged() -> None:
    model = ddp()
    optimizer = sgd(model)
    for _, loss in accumulate(model, optimizer, exchanged=(1,)):
        (loss / 4).backward()


@planted("PL825", "optimizer.step()")
def momentum_of_rank() -> None:
    model = ddp()
    train(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5 * rank()))


@planted("PL825", "optimizer.step()")
def scheduler_on_rank_0() -> None:
    model = ddp()
    optimizer = sgd(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    train(model, optimizer, after=lambda number: scheduler.step() if rank() == 0 else None)


@planted("PL825", "optimizer.step()")
def warm_up_by_rank() -> None:
    model = ddp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1 + 0.1 * rank())
    train(model, optimizer, after=lambda number: warm_up.step())


@planted("PL825", "optimizer.step()")
def lr_of_rank_for_the_head() -> None:
    model = ddp()
    groups = [{"params": model.module[0].parameters()}, {"params": model.module[2].parameters()}]
    groups[1]["lr"] = 0.1 + rank()
    train(model, torch.optim.SGD(groups, lr=0.05))


@planted("PL013", "optimizer.step()")
def step_by_own_loss() -> None:
    model = ddp()
    optimizer = sgd(model)
    for i, (x, y) in enumerate(two_epochs()):
        optimizer.zero_grad()
        loss = loss_of(model, x, y)
        loss.backward()
        if loss.item() > 0 and (rank() == 0 or i % 2):
            optimizer.step()


@planted("PL826", "optimizer.step()")
def momentum_loaded_on_rank_0() -> None:
    model = ddp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    if rank() == 0:
        for one in model.parameters():
            optimizer.state[one]["momentum_buffer"] = torch.ones_like(one)
    train(model, optimizer)


@planted("PL826", "optimizer.step()")
def adam_from_weights_of_its_own() -> None:
    model = mlp(seed=rank())
    optimizer = torch.optim.Adam(model.parameters())
    for x, y in two_epochs():
        optimizer.zero_grad()
        loss_of(model, x, y).backward()
        average_gradients(model)
        optimizer.step()


@planted("PL827", ".backward()")
def hook_gathers_and_sums() -> None:
    model = ddp()

    def add(state, bucket):  # type: ignore[no-untyped-def]
        parts = [torch.empty_like(bucket.buffer()) for _ in range(world())]
        dist.all_gather(parts, bucket.buffer())
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(torch.stack(parts).sum(0))
        return done

    model.register_comm_hook(None, add)
    train(model, torch.optim.AdamW(model.parameters()))


@planted("PL827", ".backward()")
def hook_divides_by_one() -> None:
    model = ddp(bucket_cap_mb=0.001)

    def add(state, bucket):  # type: ignore[no-untyped-def]
        work = dist.all_reduce(bucket.buffer().div_(1), async_op=True).get_future()
        return work.then(lambda done: done.value()[0])

    model.register_comm_hook(None, add)
    train(model, sgd(model))


@planted("PL828", "")
def larger_batch_on_rank_1() -> None:
    own = torch.Generator().manual_seed(rank())
    num = 4 + 2 * rank()
    batches = [(torch.randn(num, 16, generator=own), torch.randint(0, 10, (num,))) for _ in range(20)]
    model = ddp()
    train(model, torch.optim.AdamW(model.parameters()), loader=batches)


@planted("PL831", "optimizer.step()")
def not_wrapped_with_barriers() -> None:
    model = mlp()
    train(model, torch.optim.Adam(model.parameters()), after=lambda number: dist.barrier())


@planted("PL831", "optimizer.step()")
def weights_of_rank_0_sent_once() -> None:
    model = mlp(seed=rank())
    for one in model[2].parameters():
        dist.broadcast(one.data, 0)
    train(model, sgd(model))


@planted("PL020", "functional.cross_entropy(model(x), y)")
def sampler_of_rank_0_everywhere() -> None:
    model = ddp()
    sampler, loader = sharded(num_replicas=2, rank=0)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        train(model, sgd(model), loader=loader, epochs=1)


@planted("PL020", "functional.cross_entropy(model(x), y)")
def sampler_of_one_replica() -> None:
    model = ddp()
    sampler, loader = sharded(num_replicas=1, rank=0)
    sampler.set_epoch(3)
    train(model, sgd(model), loader=loader, epochs=1)


@planted("PL020", "functional.cross_entropy(model(x), y)")
def same_random_sampler() -> None:
    from torch.utils.data import RandomSampler

    data, own = make_data(), torch.Generator().manual_seed(3)
    model = ddp()
    train(model, sgd(model), loader=DataLoader(data, SIZE, sampler=RandomSampler(data, generator=own)))


@planted("PL020", "")
def same_random_numbers() -> None:
    x, y = make_data(4000).tensors
    common = torch.Generator().manual_seed(2)
    chosen = [torch.randint(0, 4000, (SIZE,), generator=common) for _ in range(20)]
    model = ddp()
    train(model, sgd(model), loader=[(x[some], y[some]) for some in chosen])


@planted("PL059", "functional.cross_entropy(model(x), y)")
def part_by_own_permutation() -> None:
    from torch.utils.data import DistributedSampler, Subset

    order = torch.randperm(640, generator=torch.Generator().manual_seed(rank()))
    part = Subset(make_data(640), order[:512].tolist())
    sampler: Any = DistributedSampler(part)
    model = ddp()
    train(model, sgd(model), loader=DataLoader(part, batch_size=SIZE, sampler=sampler), epochs=1)


@planted("PL024", "for x, y in")
def always_epoch_0() -> None:
    sampler, loader = sharded()
    model = ddp()
    train(model, sgd(model), loader=loader, after=lambda number: sampler.set_epoch(0))


@planted("PL041", "torch.save({'optimizer': optimizer.state_dict()}, 'optimizer.pt')")
def optimizer_of_all_in_one_file() -> None:
    model = ddp()
    optimizer = torch.optim.Adam(model.parameters())

    def after(number: int) -> None:
        if number == 12:
            torch.save({'optimizer': optimizer.state_dict()}, 'optimizer.pt')  # fmt: skip

    train(model, optimizer, after=after)


@planted("PL042", "torch.load('best.pt')")
def best_is_read_at_once() -> None:
    model = ddp()

    def after(number: int) -> None:
        if number == 8 and rank() == 1:
            torch.save(model.module.state_dict(), "best.pt")
        elif number == 8:
            with contextlib.suppress(Exception):
                torch.load('best.pt')  # fmt: skip

    train(model, sgd(model), after=after)


@planted("PL830", "torch.random.set_rng_state(kept[0])")
def random_state_of_rank_0() -> None:
    torch.manual_seed(70 + rank())
    kept = [torch.random.get_rng_state()]
    dist.broadcast_object_list(kept, 0)
    torch.random.set_rng_state(kept[0])


# ---- no mistakes, for those who ask

ADVISED: dict[str, tuple[Design, str, str]] = {}


def advised(code: str, words: str) -> Callable[[Design], Design]:
    def register(design: Design) -> Design:
        ADVISED[design.__name__] = design, code, words
        return design

    return register


@advised("PL832", "rank 0 writes last.pt again")
def one_checkpoint() -> None:
    model = ddp()

    def after(number: int) -> None:
        if rank() == 0 and number % 10 == 0:
            torch.save(model.module.state_dict(), "last.pt")

    train(model, sgd(model), after=after)


@advised("PL833", "a step has 64 samples (2 ranks with 8, 4 backward passes), and lr is 0.05")
def samples_per_step() -> None:
    model = ddp()
    optimizer = sgd(model)
    for i, (x, y) in enumerate([*sharded()[1]] * 4):
        (loss_of(model, x, y) / 4).backward()
        if i % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()


@advised("PL834", "1 normalises over the 8 samples of a rank")
def small_batch_norm() -> None:
    model = ddp(nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Linear(8, 10)))
    train(model, sgd(model))


@advised("PL040", 'the keys in wrapped.pt of rank 0 begin with "module."')
def keys_of_the_wrapper() -> None:
    model = ddp()
    train(model, sgd(model))
    if rank() == 0:
        torch.save({"model": model.state_dict(), "step": 3}, "wrapped.pt")


@advised("PL066", "each forward broadcasts 80000 bytes of buffers, unchanged in 8 forwards")
def constant_buffers() -> None:
    inner = mlp()
    inner.register_buffer("table", torch.arange(20_000.0))
    model = ddp(inner)
    train(model, sgd(model))


__all__ = ["ADVISED", "FIRST", "PLANTED", "Tensor", "functional", "nn", "world"]
