"""Designs that look like mistakes and are none. Each must end without a word."""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, Sampler, WeightedRandomSampler

from tests.watch.sentinels.parts import (
    NUM,
    SIZE,
    Design,
    average_gradients,
    average_weights,
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

HEALTHY: dict[str, Design] = {}


def healthy(design: Design) -> Design:
    HEALTHY[design.__name__] = design
    return design


# ---- when gradients are cleared, and how


@healthy
def plain() -> None:
    model = ddp()
    train(model, sgd(model))


@healthy
def fully_sharded_with_a_sampler() -> None:
    model = fully_sharded()
    train(model, sgd(model))


@healthy
def sums_of_shards_once_per_step() -> None:
    model = fully_sharded()
    optimizer = sgd(model)
    sampler, loader = sharded()
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for i, (x, y) in enumerate(loader):
            model.set_requires_gradient_sync(i % 4 == 3)
            (loss_of(model, x, y) / 4).backward()
            if i % 4 == 3:
                optimizer.step()
                optimizer.zero_grad(set_to_none=epoch > 0)


@healthy
def same_samples_in_a_tensor_group() -> None:
    """Pairs of ranks have the same samples because they are parts of one copy."""
    mesh = init_device_mesh("cpu", (world() // 2, 2), mesh_dim_names=("dp", "tp"))
    model = fully_sharded(mesh["dp"])
    sampler = DistributedSampler(make_data(), world() // 2, rank() // 2, shuffle=False)
    train(model, sgd(model), loader=DataLoader(make_data(), batch_size=SIZE, sampler=sampler))


@healthy
def accumulate() -> None:
    model = ddp()
    optimizer = sgd(model)
    sampler, loader = sharded()
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for i, (x, y) in enumerate(loader):
            last = (i + 1) % 4 == 0 or i + 1 == len(loader)
            with contextlib.nullcontext() if last else model.no_sync():
                (loss_of(model, x, y) / 4).backward()
            if last:
                optimizer.step()
                optimizer.zero_grad()


@healthy
def accumulate_divided_inside() -> None:
    model = ddp()
    optimizer = sgd(model)
    _, loader = sharded()
    for i, (x, y) in enumerate([*loader] * 2):
        (functional.cross_entropy(model(x), y, reduction="none") / 5).mean().backward()
        if i % 5 == 4:
            optimizer.step()
            optimizer.zero_grad()


@healthy
def accumulate_by_gradient_argument() -> None:
    model = ddp()
    optimizer = sgd(model)
    _, loader = sharded()
    for i, (x, y) in enumerate([*loader] * 2):
        loss_of(model, x, y).backward(gradient=torch.tensor(0.25))
        if i % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()


@healthy
def zero_in_place() -> None:
    model = ddp()
    optimizer = sgd(model)
    _, loader = sharded()
    for x, y in [*loader] * 2:
        loss = loss_of(model, x, y)
        optimizer.zero_grad(set_to_none=False)
        loss.backward()
        optimizer.step()


@healthy
def zero_by_data() -> None:
    model = ddp()
    optimizer = sgd(model)
    _, loader = sharded()
    for x, y in [*loader] * 2:
        loss_of(model, x, y).backward()
        optimizer.step()
        for parameter in model.parameters():
            parameter.grad.data.zero_()


@healthy
def bucket_view() -> None:
    model = ddp(gradient_as_bucket_view=True)
    optimizer = sgd(model)
    _, loader = sharded()
    for i, (x, y) in enumerate([*loader] * 2):
        optimizer.zero_grad(set_to_none=i % 2 == 1)
        loss_of(model, x, y).backward()
        optimizer.step()


@healthy
def gradient_momentum_by_hand() -> None:
    """Keeps a decayed sum of gradients in place of the optimizer's momentum."""
    model = ddp()
    optimizer = sgd(model)
    _, loader = sharded()
    for x, y in [*loader] * 2:
        loss_of(model, x, y).backward()
        optimizer.step()
        for parameter in model.parameters():
            parameter.grad.mul_(0.9)


@healthy
def gan() -> None:
    maker, judge = ddp(nn.Linear(4, 16)), ddp(mlp(1))
    of_maker, of_judge = sgd(maker), sgd(judge)
    bce = functional.binary_cross_entropy_with_logits
    sampler, loader = sharded()
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, _ in loader:
            one, z = torch.ones(len(x), 1), torch.randn(len(x), 4)
            of_judge.zero_grad()
            bce(judge(x), one).backward()
            bce(judge(maker(z).detach()), 0 * one).backward()
            of_judge.step()
            of_maker.zero_grad()
            bce(judge(maker(z)), one).backward()
            of_maker.step()


@healthy
def gan_in_a_loop() -> None:
    """The judge's two losses come from one line, and each is a mean."""
    maker, judge = ddp(nn.Linear(4, 16)), ddp(mlp(1))
    of_maker, of_judge = sgd(maker), sgd(judge)
    bce = functional.binary_cross_entropy_with_logits
    _, loader = sharded()
    for x, _ in [*loader] * 2:
        z = torch.randn(len(x), 4)
        judge.zero_grad()
        for batch, target in ((x, 1.0), (maker(z).detach(), 0.0)):
            bce(judge(batch), torch.full((len(x), 1), target)).backward()
        of_judge.step()
        maker.zero_grad()
        bce(judge(maker(z)), torch.ones(len(x), 1)).backward()
        of_maker.step()


@healthy
def adversarial() -> None:
    model = ddp()
    optimizer = sgd(model)
    _, loader = sharded()
    for x, y in [*loader] * 2:
        for k in range(3):
            x = x.detach().requires_grad_(k < 2)
            optimizer.zero_grad()
            loss_of(model, x, y).backward()
            if k < 2:
                x = x + 0.01 * x.grad.sign()
        optimizer.step()


@healthy
def multi_task() -> None:
    model = ddp()
    optimizer = sgd(model)
    _, loader = sharded()
    for x, y in [*loader] * 2:
        optimizer.zero_grad()
        for task in range(3):
            with contextlib.nullcontext() if task == 2 else model.no_sync():
                loss_of(model, x, (y + task) % 10).backward()
        optimizer.step()


@healthy
def token_sum() -> None:
    model = ddp()
    optimizer = sgd(model)
    _, loader = sharded()
    for i, (x, y) in enumerate([*loader] * 2):
        functional.cross_entropy(model(x), y, reduction="sum").backward()
        if i % 4 == 3:
            for parameter in model.parameters():
                parameter.grad /= 4 * SIZE
            optimizer.step()
            optimizer.zero_grad()


@healthy
def mean_then_divide() -> None:
    model = ddp()
    optimizer = sgd(model)
    _, loader = sharded()
    for i, (x, y) in enumerate([*loader] * 2):
        loss_of(model, x, y).backward()
        if i % 4 == 3:
            for parameter in model.parameters():
                parameter.grad /= 4
            optimizer.step()
            optimizer.zero_grad()


@healthy
def two_optimizers() -> None:
    """The gradients of one wait while the other steps."""
    model = ddp()
    first = torch.optim.SGD(model.module[0].parameters(), lr=0.05)
    second = torch.optim.Adam(model.module[2].parameters(), lr=0.001)
    _, loader = sharded()
    for i, (x, y) in enumerate([*loader] * 2):
        loss_of(model, x, y).backward()
        first.step()
        first.zero_grad()
        if i % 4 == 3:
            second.step()
            second.zero_grad()


@healthy
def lbfgs() -> None:
    model = ddp()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
    _, loader = sharded()
    for x, y in [*loader][:6]:

        def closure(x: Tensor = x, y: Tensor = y) -> Any:
            optimizer.zero_grad()
            loss = loss_of(model, x, y)
            loss.backward()
            return loss

        optimizer.step(closure)


@healthy
def scaler() -> None:
    model = ddp()
    optimizer = sgd(model)
    grad_scaler = torch.amp.GradScaler("cpu")
    _, loader = sharded()
    for x, y in [*loader] * 2:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model, x, y)
        grad_scaler.scale(loss).backward()
        grad_scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        grad_scaler.step(optimizer)
        grad_scaler.update()


@healthy
def sharpness_aware() -> None:
    """Two passes per step, at the weights and beside them; only the second is used."""
    model = ddp()
    optimizer = sgd(model)
    _, loader = sharded()
    for x, y in [*loader] * 2:
        loss_of(model, x, y).backward()
        with torch.no_grad():
            moves = [
                0.05 * parameter.grad / (parameter.grad.norm() + 1e-6) for parameter in model.parameters()
            ]
            for parameter, move in zip(model.parameters(), moves, strict=True):
                parameter += move
        optimizer.zero_grad()
        loss_of(model, x, y).backward()
        with torch.no_grad():
            for parameter, move in zip(model.parameters(), moves, strict=True):
                parameter -= move
        optimizer.step()
        optimizer.zero_grad()


@healthy
def sums_of_its_own() -> None:
    """Takes each gradient away and gives the optimizer their mean."""
    model = ddp()
    optimizer = sgd(model)
    sampler, loader = sharded()
    for epoch in range(2):
        sampler.set_epoch(epoch)
        totals = [torch.zeros_like(parameter) for parameter in model.parameters()]
        for i, (x, y) in enumerate(loader):
            optimizer.zero_grad()
            loss_of(model, x, y).backward()
            for total, parameter in zip(totals, model.parameters(), strict=True):
                total += parameter.grad
            if i % 4 == 3:
                for total, parameter in zip(totals, model.parameters(), strict=True):
                    parameter.grad.copy_(total / 4)
                    total.zero_()
                optimizer.step()


@healthy
def skips_bad_batches() -> None:
    """Gradients of some batches are cleared on purpose."""
    model = ddp()
    optimizer = sgd(model)
    sampler, loader = sharded()
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for i, (x, y) in enumerate(loader):
            loss_of(model, x, y).backward()
            if i % 5 != 3:
                optimizer.step()
            optimizer.zero_grad()


@healthy
def measures_gradients_first() -> None:
    """Looks at the gradients of a batch, by another line, before it trains on the next."""
    model = ddp()
    optimizer = sgd(model)
    sampler, loader = sharded()
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for i, (x, y) in enumerate(loader):
            optimizer.zero_grad()
            if i % 2:
                loss_of(model, x, y).backward()
                optimizer.step()
            else:
                loss_of(model, x, y).backward()


# ---- copies that may differ


@healthy
def local_sgd() -> None:
    model = mlp()
    train(model, sgd(model), after=lambda n: average_weights(model) if n % 8 == 0 else None)


@healthy
def federated() -> None:
    """Two local epochs, then an average."""
    model = mlp()
    train(model, sgd(model), epochs=4, after=lambda n: average_weights(model) if n % 20 == 0 else None)


@healthy
def local_sgd_in_ddp() -> None:
    model = ddp()
    optimizer = sgd(model)
    _, loader = sharded()
    for i, (x, y) in enumerate([*loader] * 3):
        with model.no_sync():
            optimizer.zero_grad()
            loss_of(model, x, y).backward()
            optimizer.step()
        if i % 8 == 7:
            average_weights(model.module)


@healthy
def post_local() -> None:
    from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
        PostLocalSGDState,
        post_localSGD_hook,
    )
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer

    model = ddp()
    alone = dist.new_group([rank()], use_local_synchronization=True)
    model.register_comm_hook(PostLocalSGDState(None, alone, 4), post_localSGD_hook)
    averager = PeriodicModelAverager(period=8, warmup_steps=4)
    train(model, PostLocalSGDOptimizer(sgd(model), averager))


@healthy
def compressed() -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    model = ddp()
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    train(model, sgd(model))


@healthy
def power_sgd() -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    model = ddp()
    state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=4, matrix_approximation_rank=1)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    train(model, sgd(model))


@healthy
def hook_sums_what_loss_divides() -> None:
    """The loss is the rank's part of the global mean, so that the sum over ranks is right."""
    model = ddp()

    def add(state, bucket):  # type: ignore[no-untyped-def]  # DDP checks annotations
        work = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
        return work.then(lambda done: done.value()[0])

    model.register_comm_hook(None, add)
    train(model, sgd(model), loss=lambda m, x, y: loss_of(m, x, y) / world())


@healthy
def zero_optimizer() -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = ddp(nn.Sequential(*[nn.Linear(16, 16) for _ in range(6)], nn.Linear(16, 10)))
    train(model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.05))


@healthy
def ensemble() -> None:
    """One model per rank, each on all of the data."""
    model = mlp(seed=rank())
    loader = DataLoader(make_data(), batch_size=SIZE, shuffle=True)
    train(model, sgd(model, 0.01 * (rank() + 1)), loader=loader)
    torch.save(model.state_dict(), f"member{rank()}.pt")


@healthy
def bagging() -> None:
    """One model per rank, each on its part of the data, by a sampler that splits."""
    model = mlp(seed=rank())
    train(model, sgd(model))
    torch.save(model.state_dict(), f"bag{rank()}.pt")


@healthy
def sweep() -> None:
    """Each rank tries another learning rate with the same seed and the same data."""
    model = mlp()
    train(model, sgd(model, 0.01 * (rank() + 1)), loader=DataLoader(make_data(), batch_size=SIZE))


@healthy
def model_parallel() -> None:
    """Two stages of equal shapes."""
    stage = nn.Linear(16, 16)
    optimizer = sgd(stage)
    for _ in range(30):
        optimizer.zero_grad()
        if rank() == 0:
            out = stage(torch.randn(SIZE, 16))
            dist.send(out.detach(), 1)
            gradient = torch.empty(SIZE, 16)
            dist.recv(gradient, 1)
            out.backward(gradient)
        else:
            got = torch.empty(SIZE, 16)
            dist.recv(got, 0)
            stage(got.requires_grad_()).pow(2).mean().backward()
            dist.send(got.grad, 0)
        optimizer.step()


@healthy
def server() -> None:
    """Rank 0 steps and broadcasts."""
    model = mlp()
    optimizer = sgd(model)
    _, loader = sharded()
    for x, y in [*loader] * 2:
        model.zero_grad()
        loss_of(model, x, y).backward()
        for parameter in model.parameters():
            dist.reduce(parameter.grad, 0)
        if rank() == 0:
            optimizer.step()
        for parameter in model.parameters():
            dist.broadcast(parameter.data, 0)


@healthy
def server_around_ddp() -> None:
    model = ddp()
    optimizer = sgd(model)
    _, loader = sharded()
    for x, y in [*loader] * 2:
        model.zero_grad()
        loss_of(model, x, y).backward()
        if rank() == 0:
            optimizer.step()
        for parameter in model.module.parameters():
            dist.broadcast(parameter.data, 0)


@healthy
def own_average() -> None:
    model = mlp()
    optimizer = sgd(model)
    _, loader = sharded()
    for x, y in [*loader] * 2:
        optimizer.zero_grad()
        loss_of(model, x, y).backward()
        average_gradients(model)
        optimizer.step()


@healthy
def weights_corrected_each_step() -> None:
    """Ranks have settings of their own, and average the weights after each step."""
    model = ddp()
    train(model, sgd(model, 0.01 * (rank() + 1)), after=lambda n: average_weights(model.module))


@healthy
def ema() -> None:
    model = ddp()
    average = copy.deepcopy(model.module)

    def after(number: int) -> None:
        with torch.no_grad():
            for slow, fast in zip(average.parameters(), model.module.parameters(), strict=True):
                slow.lerp_(fast, 0.1)
        if rank() == 0 and number % 10 == 0:
            torch.save(average.state_dict(), "ema.tmp")
            os.replace("ema.tmp", "ema.pt")

    train(model, sgd(model), after=after)


@healthy
def ema_on_rank_0() -> None:
    """Evaluates with averaged weights on rank 0 only, and puts the trained ones back."""
    model = ddp()
    slow = copy.deepcopy(model.module)

    def after(number: int) -> None:
        with torch.no_grad():
            for mine, fast in zip(slow.parameters(), model.module.parameters(), strict=True):
                mine.lerp_(fast, 0.1)
        if rank() == 0 and number % 5 == 0:
            kept = copy.deepcopy(model.module.state_dict())
            model.module.load_state_dict(slow.state_dict())
            model.module(torch.randn(2, 16))
            model.module.load_state_dict(kept)

    train(model, sgd(model), after=after)


@healthy
def frozen() -> None:
    net = mlp()
    net[0].requires_grad_(False)
    train(ddp(net), torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=0.01))


@healthy
def groups_of_one() -> None:
    """Data parallel groups of their own: another batch, another learning rate, another model."""
    groups = [dist.new_group([one]) for one in range(world())]
    model = ddp(mlp(seed=rank()), process_group=groups[rank()])
    train(model, sgd(model, 0.01 * (rank() + 1)))


@healthy
def parts_of_a_layer() -> None:
    """Each rank has its half of a layer, by hand: equal shapes, other weights, and one bias for both."""
    half = nn.Linear(8, 8)
    with torch.no_grad():
        half.weight.add_(0.1 * rank())
    optimizer = sgd(half)
    for _ in range(20):
        optimizer.zero_grad()
        part = torch.randn(SIZE, 16)[:, 8 * rank() % 16 :][:, :8]
        out = half(part)
        dist.all_reduce(out.data)
        out.pow(2).mean().backward()
        optimizer.step()


@healthy
def fsdp() -> None:
    from torch.distributed.fsdp import fully_shard

    model = mlp()
    fully_shard(model)
    train(model, sgd(model), epochs=2)


@healthy
def tensor_parallel() -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (world(),))
    model = parallelize_module(mlp(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    train(model, sgd(model), loader=DataLoader(make_data(), batch_size=SIZE))


@healthy
def compiled() -> None:
    model = ddp()
    train(torch.compile(model, backend="eager"), sgd(model), epochs=2)


@healthy
def two_models() -> None:
    one, two = ddp(), ddp()
    of_one, of_two = sgd(one), sgd(two, 0.1)
    _, loader = sharded()
    for x, y in [*loader] * 2:
        for model, optimizer in ((one, of_one), (two, of_two)):
            optimizer.zero_grad()
            loss_of(model, x, y).backward()
            optimizer.step()


@healthy
def models_made_anew() -> None:
    """One model after the other, of the same shape, with other settings."""
    for lr in (0.01, 0.1):
        model = ddp()
        train(model, sgd(model, lr), epochs=1)


@healthy
def resume() -> None:
    model = ddp()
    if rank() == 0:
        torch.save({"m": model.state_dict()}, "r.tmp")
        os.replace("r.tmp", "resume.pt")
    dist.barrier()
    model.load_state_dict(torch.load("resume.pt")["m"])

    def after(number: int) -> None:
        if number % 10 == 0:
            if rank() == 0:
                torch.save({"m": model.module.state_dict()}, "r.tmp")
                os.replace("r.tmp", "resume.pt")
            dist.barrier()

    train(model, sgd(model), after=after)


@healthy
def rank_0_works_more() -> None:
    """Rank 0 trains another model beside it, so that its passes are not those of the others."""
    model, probe = ddp(), mlp()
    of_probe = sgd(probe)

    def after(number: int) -> None:
        if rank() == 0:
            of_probe.zero_grad()
            probe(torch.randn(4, 16)).pow(2).mean().backward()
            of_probe.step()

    train(model, sgd(model), after=after)


# ---- samples that may be the same


@healthy
def one_batch() -> None:
    """One fixed batch, to see whether the model can learn."""
    x, y = next(iter(DataLoader(make_data(), batch_size=SIZE)))
    model = ddp()
    train(model, sgd(model), loader=[(x, y)] * 20)


@healthy
def files_per_rank() -> None:
    loader = DataLoader(make_data(seed=50 + rank()), batch_size=SIZE, shuffle=True)
    model = ddp()
    train(model, sgd(model), loader=loader)


@healthy
def with_replacement() -> None:
    torch.manual_seed(30 + rank())
    draws = WeightedRandomSampler(torch.ones(NUM), 200, replacement=True)
    model = ddp()
    train(model, sgd(model), loader=DataLoader(make_data(), batch_size=SIZE, sampler=draws))
    torch.manual_seed(0)


@healthy
def curriculum() -> None:
    """The same order again, on purpose and by its own sampler."""

    class Easy(Sampler[int]):
        num = 40

        def __iter__(self) -> Iterator[int]:
            return iter(range(rank(), self.num, world()))

        def __len__(self) -> int:
            return len(range(rank(), self.num, world()))

    own = Easy()
    model = ddp()
    optimizer = sgd(model)
    for epoch in range(4):
        own.num = 40 * (epoch + 1)
        train(model, optimizer, loader=DataLoader(make_data(), batch_size=SIZE, sampler=own), epochs=1)


@healthy
def stream_by_rank() -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            g = torch.Generator().manual_seed(5)
            for n in range(NUM):
                x, y = torch.randn(16, generator=g), torch.randint(0, 10, (), generator=g)
                if n % world() == rank():
                    yield x, y

    model = ddp()
    train(model, sgd(model), loader=DataLoader(Stream(), batch_size=SIZE))


@healthy
def same_prompts() -> None:
    """All ranks load the same prompts, and each trains on answers that it draws itself."""
    model = ddp()
    own = torch.Generator().manual_seed(rank())

    def loss(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return loss_of(m, x + torch.randn(x.shape, generator=own), y)

    train(model, sgd(model), loader=DataLoader(make_data(), batch_size=SIZE), loss=loss)


@healthy
def tasks_by_rank() -> None:
    class Tasks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.heads = nn.ModuleDict({name: nn.Linear(SIZE, 1) for name in ("left", "right")})

        def forward(self, x: Tensor, task: str) -> Tensor:
            return self.heads[task](x)  # type: ignore[no-any-return]

    model = nn.parallel.DistributedDataParallel(Tasks(), find_unused_parameters=True)
    optimizer = sgd(model)
    own = torch.Generator().manual_seed(rank() // 2)  # two ranks have the same samples, for unlike tasks
    for step in range(10):
        optimizer.zero_grad()
        model(
            torch.randn(6, SIZE, generator=own), ("left", "right")[(rank() + step // 5) % 2]
        ).square().mean().backward()
        optimizer.step()


@healthy
def one_batch_in_parts() -> None:
    """All ranks load the global batch, and each takes its part."""
    model = ddp()

    def loss(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return loss_of(m, x[rank() :: world()], y[rank() :: world()])

    train(model, sgd(model), loader=DataLoader(make_data(), batch_size=2 * SIZE), loss=loss)


@healthy
def data_that_repeat() -> None:
    """A small set, repeated: a rank sees a sample as often as the others do."""
    data = make_data(16)
    own = torch.Generator().manual_seed(rank())
    loader = DataLoader(data, batch_size=SIZE, shuffle=True, generator=own)
    model = ddp()
    train(model, sgd(model), loader=[batch for _ in range(8) for batch in loader])


@healthy
def many_epochs_of_a_small_set() -> None:
    """A sampler that splits, and reshuffles in each epoch: ranks meet each other's samples later."""
    from torch.utils.data import DistributedSampler

    data = make_data(32)
    sampler = DistributedSampler(data)
    model = ddp()
    optimizer = sgd(model)
    for epoch in range(20):
        sampler.set_epoch(epoch)
        train(model, optimizer, loader=DataLoader(data, batch_size=SIZE, sampler=sampler), epochs=1)


@healthy
def rollouts() -> None:
    model = ddp(mlp(4))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    own = torch.Generator().manual_seed(rank())
    for _ in range(20):
        states = torch.randn(SIZE, 16, generator=own)
        advantage = model(states).softmax(-1)[:, 0].detach()
        for _ in range(2):
            optimizer.zero_grad()
            (-model(states).log_softmax(-1)[:, 0] * advantage).mean().backward()
            optimizer.step()


@healthy
def weighted_sizes() -> None:
    """Unequal batches, weighted by hand."""
    num = 24 if rank() == 0 else 8
    model = ddp()
    own = torch.Generator().manual_seed(rank())
    batches = [(torch.randn(num, 16, generator=own), torch.randint(0, 10, (num,))) for _ in range(20)]
    train(model, sgd(model), loader=batches, loss=lambda m, x, y: loss_of(m, x, y) * (num * world() / 32))


@healthy
def graphs_of_any_size() -> None:
    """The first dimension counts nodes, and differs from batch to batch."""
    model = ddp()
    own = torch.Generator().manual_seed(rank())
    sizes = torch.randint(4, 30, (20,), generator=own).tolist()
    batches = [(torch.randn(n, 16, generator=own), torch.randint(0, 10, (n,))) for n in sizes]
    train(model, sgd(model), loader=batches)


@healthy
def evaluate() -> None:
    model = ddp().eval()
    with torch.no_grad():
        for x, _ in DataLoader(make_data(), batch_size=SIZE):
            model(x)


# ---- orders that may repeat


@healthy
def fixed_order() -> None:
    sampler, loader = sharded(shuffle=False)
    model = ddp()
    train(model, sgd(model), loader=loader)
    assert sampler.epoch == 0


@healthy
def peek() -> None:
    _, loader = sharded()
    next(iter(loader))
    model = ddp()
    train(model, sgd(model), loader=loader, epochs=1)


@healthy
def evaluate_on_training_set() -> None:
    sampler, loader = sharded()
    model = ddp()
    optimizer = sgd(model)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        train(model, optimizer, loader=loader, epochs=1)
        with torch.no_grad():
            for x, _ in loader:
                model(x)


@healthy
def evaluate_within_an_epoch() -> None:
    _, loader = sharded()
    model = ddp()
    optimizer = sgd(model)
    for i, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        loss_of(model, x, y).backward()
        optimizer.step()
        if i % 3 == 2:
            with torch.no_grad():
                for other, _ in loader:
                    model(other)


# ---- files and random numbers


@healthy
def turns() -> None:
    for one in range(world()):
        if one == rank():
            torch.save(torch.ones(3), "turn.pt")
        dist.barrier()


@healthy
def save_then_all_load() -> None:
    model = ddp()
    train(model, sgd(model), epochs=1)
    for _ in range(3):
        if rank() == 0:
            torch.save(model.module.state_dict(), "best.pt")
        dist.barrier()
        torch.load("best.pt")
        dist.barrier()


@healthy
def own_files() -> None:
    torch.save(torch.get_rng_state(), f"state{rank()}.pt")
    torch.set_rng_state(torch.load(f"state{rank()}.pt"))


@healthy
def one_seed_for_all() -> None:
    torch.manual_seed(3)
    kept = torch.get_rng_state()
    torch.randn(5)
    torch.set_rng_state(kept)
