"""Training that is not one loss and one optimizer: GANs, distillation, LoRA; on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

from paceline.train.trainer import Trainer
from tests.dist.pool import Pool
from tests.train.cases import (
    Trained,
    apart,
    assert_ranks_agree,
    assert_same_run,
    take_steps,
    tensors_apart,
)

WIDTH, NOISE, NUM_SAMPLES = 8, 4, 27


class Samples(Dataset[dict[str, Tensor]]):
    """Real points, with the noise for the generator; 27 of them end an epoch raggedly."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        return {
            "real": torch.randn(WIDTH, generator=generator) * 2 + 1,
            "noise": torch.randn(NOISE, generator=generator),
        }


def all_samples() -> dict[str, Tensor]:
    rows = [Samples()[index] for index in range(NUM_SAMPLES)]
    return {key: torch.stack([row[key] for row in rows]).double() for key in rows[0]}


# ---- a GAN


def build_generator() -> nn.Module:
    # No bias whose true gradient is 0, as BatchNorm takes it away (the discriminator's, for the last one):
    # Adam would make full steps of its rounding.
    return nn.Sequential(
        nn.Linear(NOISE, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, WIDTH, bias=False)
    )


def build_discriminator() -> nn.Module:
    return nn.Sequential(
        nn.Linear(WIDTH, 16, bias=False), nn.BatchNorm1d(16), nn.LeakyReLU(), nn.Linear(16, 1)
    )


def judge(logits: Tensor, real: bool) -> Tensor:
    target = torch.full_like(logits, float(real))
    return functional.binary_cross_entropy_with_logits(logits, target, reduction="sum")


def discriminator_loss(models: dict[str, nn.Module], batch: dict[str, Tensor]) -> Any:
    fake = models["generator"](batch["noise"])
    real = judge(models["discriminator"](batch["real"]), True)
    return real + judge(models["discriminator"](fake), False), 2 * len(fake)


def generator_loss(models: dict[str, nn.Module], batch: dict[str, Tensor]) -> Any:
    fake = models["generator"](batch["noise"])
    return judge(models["discriminator"](fake), True), len(fake)


def train_gan(update: Any) -> None:
    update("discriminator", discriminator_loss)
    update("discriminator", discriminator_loss)
    update("generator", generator_loss)


def adam(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.Adam([p for _, p in named], lr=0.01, betas=(0.5, 0.99))


def build_gan(microbatch_size: int, **settings: Any) -> Trainer:
    return Trainer(
        {"generator": build_generator, "discriminator": build_discriminator},
        optimizer={"generator": adam, "discriminator": adam},
        step=train_gan,
        dtype="fp64",
        microbatch_size=microbatch_size,
        **settings,
    )


def run_gan(world: Any, microbatch_size: int, num_steps: int, first: dict[str, Tensor] | None) -> Trained:
    trainer = build_gan(microbatch_size)
    if first is None:
        first = {
            f"{name}.{key}": tensor.clone()
            for name, model in trainer.models.items()
            for key, tensor in model.state_dict().items()
        }
    loader = trainer.loader(Samples(), global_batch_size=11, shuffle=False)
    trained = Trained()
    losses = []
    while trainer.step_number < num_steps:
        for share in loader:
            step = trainer.step(share)
            losses += [step.updates["discriminator"].loss, step.updates["generator"].loss]
            assert step.loss == step.updates["discriminator"].loss, "of the first model updated"
            if step.number == num_steps:
                break
    trained.losses, trained.extra = losses, first
    return trained.finish(trainer)


def plain_gan(first: dict[str, Tensor], num_steps: int) -> tuple[list[float], dict[str, Tensor]]:
    """Compute the expected result: a plain loop in one process."""
    models = {"generator": build_generator().double(), "discriminator": build_discriminator().double()}
    for name, model in models.items():
        model.load_state_dict({k.removeprefix(f"{name}."): t for k, t in first.items() if k.startswith(name)})
    generator, discriminator = models["generator"], models["discriminator"]
    optimizers = {name: adam(list(model.named_parameters())) for name, model in models.items()}
    samples, losses = all_samples(), []
    for step in range(num_steps):
        start = 11 * (step % 3)
        batch = {key: values[start : start + 11] for key, values in samples.items()}
        for _ in range(2):
            fake = generator(batch["noise"]).detach()
            loss = judge(discriminator(batch["real"]), True) + judge(discriminator(fake), False)
            loss = loss / (2 * len(fake))
            optimizers["discriminator"].zero_grad()
            loss.backward()
            optimizers["discriminator"].step()
        losses.append(loss.item())
        loss = judge(discriminator(generator(batch["noise"])), True) / len(batch["noise"])
        optimizers["generator"].zero_grad()
        loss.backward()
        optimizers["generator"].step()
        losses.append(loss.item())
    tensors = {f"{name}.{key}": t for name, model in models.items() for key, t in model.state_dict().items()}
    return losses, tensors


def test_a_gan_is_the_plain_loops(ranks: Pool) -> None:
    """With one microbatch per global batch, as BatchNorm sees microbatches; ranks but the first idle."""
    one = ranks.run(run_gan, nproc=1, args=(11, 5, None))[0]
    losses, tensors = plain_gan(one.extra, 5)
    assert apart(losses, one.losses) <= 1e-12
    assert tensors_apart(tensors, one.tensors) <= 1e-10


def test_a_gan_is_the_same_on_any_number_of_ranks(ranks: Pool) -> None:
    one = ranks.run(run_gan, nproc=1, args=(3, 6, None))[0]
    assert len(set(one.losses)) == 12
    for nproc in (2, 3):
        results = ranks.run(run_gan, nproc=nproc, args=(3, 6, None))
        assert_ranks_agree(results)
        assert apart(one.losses, results[0].losses) <= 1e-12
        assert tensors_apart(one.tensors, results[0].tensors) <= 1e-10


# ---- distillation


class Teacher(nn.Module):
    """Frozen by having no optimizer; its factory draws other weights than the student's would."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, 16), nn.Dropout(0.5), nn.BatchNorm1d(16), nn.Linear(16, 3))
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


def build_student() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 6), nn.Tanh(), nn.Dropout(0.2), nn.Linear(6, 3))


def distil(models: dict[str, nn.Module], batch: dict[str, Tensor]) -> Any:
    teacher = models["teacher"](batch["real"])
    assert not teacher.requires_grad, "nobody asked for the teacher's gradients"
    student = functional.log_softmax(models["student"](batch["real"]), -1)
    losses = functional.kl_div(student, teacher.softmax(-1), reduction="none").sum(-1)
    return losses.sum(), len(losses)


def run_distillation(world: Any) -> Trained:
    trainer = Trainer(
        {"teacher": Teacher, "student": build_student},
        optimizer={"student": lambda named: torch.optim.AdamW([p for _, p in named], lr=0.02)},
        step=lambda update: update("student", distil),
        dtype="fp64",
        microbatch_size=2,
    )
    first = {n: t.clone() for n, t in trainer.models["teacher"].state_dict().items()}
    trained = take_steps(trainer, trainer.loader(Samples(), global_batch_size=7), 8)
    last = trainer.models["teacher"].state_dict()
    assert all(torch.equal(first[name], last[name]) for name in first)
    assert all(p.requires_grad and p.grad is None for p in trainer.models["teacher"].parameters())
    return trained


def test_distillation_is_the_same_on_any_number_of_ranks(ranks: Pool) -> None:
    one = ranks.run(run_distillation, nproc=1)[0]
    assert one.losses[-1] < one.losses[0]
    for nproc in (2, 3):
        results = ranks.run(run_distillation, nproc=nproc)
        assert_ranks_agree(results)
        assert_same_run(one, results[0], losses=1e-12, tensors=1e-10)


# ---- LoRA with frozen weights, an average of weights and a custom schedule


class Lora(nn.Module):
    """W x + B A x, W frozen."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, base.in_features) * 0.3)
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.down.T @ self.up.T


class Ema:
    """An average of the trained weights, updated in the loop."""

    def __init__(self, model: nn.Module, decay: float = 0.8) -> None:
        self.decay = decay
        self.average = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            if name in self.average:
                self.average[name].lerp_(parameter, 1 - self.decay)

    def state_dict(self) -> dict[str, Any]:
        return {"decay": self.decay, "average": self.average}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.decay = state["decay"]
        for name, value in state["average"].items():
            self.average[name].copy_(value)


def build_lora() -> nn.Module:
    return nn.Sequential(
        Lora(nn.Linear(WIDTH, 16)),
        nn.Tanh(),
        nn.Dropout(0.1),
        Lora(nn.Linear(16, WIDTH)),
        nn.LayerNorm(WIDTH),
    ).requires_grad_(True)


def freeze(model: nn.Module) -> nn.Module:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("down" in name or "up" in name)
    return model


def lora_optimizer(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """Two groups by name; frozen parameters are not given at all."""
    return torch.optim.AdamW(
        [
            {"params": [p for n, p in named if n.endswith("down")], "lr": 0.02, "weight_decay": 0.1},
            {"params": [p for n, p in named if n.endswith("up")], "lr": 0.05, "weight_decay": 0.0},
        ]
    )


def lora_schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, [0.02, 0.05], total_steps=12)


def run_lora(world: Any, folder: str | None, last: int) -> Trained:
    trainer = Trainer(
        lambda: freeze(build_lora()),
        forward=lambda model, batch: model(batch["real"]),
        loss=lambda output, batch: ((output - batch["real"]).square().mean(1).sum(), len(output)),
        optimizer=lora_optimizer,
        schedule=lora_schedule,
        dtype="fp64",
        microbatch_size=2,
        clip_norm=0.1,
    )
    frozen = {n: p.detach().clone() for n, p in trainer.model.named_parameters() if not p.requires_grad}
    ema = Ema(trainer.model)
    trainer.track(ema=ema)
    loader = trainer.loader(Samples(), global_batch_size=7)
    if folder is not None:
        trainer.resume(folder)
    trained = Trained(extra=[])
    while trainer.step_number < last:
        for share in loader:
            step = trainer.step(share)
            ema.update(trainer.model)
            trained.losses.append(step.loss)
            trained.extra.append(step.lr)
            if step.number == last:
                break
    if folder is not None:
        trainer.save()
    assert all(torch.equal(p, frozen[n]) for n, p in trainer.model.named_parameters() if n in frozen)
    trained.finish(trainer)
    trained.tensors |= {f"ema.{name}": value for name, value in ema.average.items()}
    return trained


def test_lora_with_an_average_and_a_schedule(ranks: Pool, tmp_path: Any) -> None:
    one = ranks.run(run_lora, nproc=1, args=(None, 10))[0]
    assert one.losses[-1] < one.losses[0]
    assert len({round(lr, 12) for lr in one.extra}) == 10, "the schedule moves every step"
    for nproc in (2, 3):
        results = ranks.run(run_lora, nproc=nproc, args=(None, 10))
        assert_ranks_agree(results)
        assert apart(one.losses, results[0].losses) <= 1e-12
        assert tensors_apart(one.tensors, results[0].tensors) <= 1e-10
    # All of it is in the checkpoint: groups, schedule, the average.
    ranks.run(run_lora, nproc=2, args=(str(tmp_path), 4))
    resumed = ranks.run(run_lora, nproc=3, args=(str(tmp_path), 10))[0]
    assert apart(one.losses[4:], resumed.losses) <= 1e-12
    assert tensors_apart(one.tensors, resumed.tensors) <= 1e-10
    assert resumed.extra == one.extra[4:]


# ---- smaller ways to use it


def call_defaults(world: Any, kind: str) -> list[float]:
    """Check that the batch decides how the model is called: with names, positions or one tensor."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, 1)

        def forward(self, real: Tensor, noise: Tensor | None = None) -> Tensor:
            return self.linear(real) + (0 if noise is None else noise.sum(1, keepdim=True))

    def collate(rows: list[dict[str, Tensor]]) -> Any:
        real, noise = (torch.stack([row[key] for row in rows]) for key in ("real", "noise"))
        return {"dict": {"noise": noise, "real": real}, "tuple": (real, noise), "tensor": real}[kind]

    trainer = Trainer(
        Net,
        loss=lambda output, batch: (output.square().sum(), len(output)),
        optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.01),
        microbatch_size=4,
    )
    loader = trainer.loader(Samples(), global_batch_size=9, shuffle=False, collate=collate)
    return [trainer.step(share).loss for share in loader]


def test_the_default_forward_follows_the_batch(ranks: Pool) -> None:
    (names, _), (places, _), (tensor, _) = (
        ranks.run(call_defaults, args=(kind,)) for kind in ("dict", "tuple", "tensor")
    )
    assert names == places
    assert names != tensor


def change_gradients(world: Any, hook: str, clip_norm: float) -> Trained:
    trainer = Trainer(
        build_student,
        forward=lambda model, batch: model(batch["real"]),
        loss=lambda output, batch: (output.square().sum(), len(output)),
        optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.1),
        dtype="fp64",
        microbatch_size=2,
        clip_norm=clip_norm,
    )

    def halve(gradients: dict[str, Tensor]) -> None:
        for gradient in gradients.values():
            gradient /= 2

    if hook:
        trainer.on_gradients(halve)
    if hook == "both":
        trainer.on_gradients(lambda gradients: [g.mul_(2) for g in gradients.values()])
    loader = trainer.loader(Samples(), global_batch_size=9)
    first = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
    grad_norms = take_steps(trainer, loader, 1).grad_norms
    changes = {n: first[n] - p.detach() for n, p in trainer.model.named_parameters()}
    trained = take_steps(trainer, loader, 3)
    trained.extra, trained.grad_norms = changes, grad_norms + trained.grad_norms
    return trained


def test_gradient_hooks_come_after_reduction_and_before_clipping(ranks: Pool) -> None:
    def run(hook: str, clip_norm: float) -> Trained:
        results = ranks.run(change_gradients, args=(hook, clip_norm))
        assert_ranks_agree(results)
        return results[0]

    plain, halved, both = (run(hook, 0.0) for hook in ("", "half", "both"))
    assert tensors_apart(plain.tensors, both.tensors) <= 1e-15
    # After SGD's first step the change is the gradient.
    assert tensors_apart(plain.extra, {n: 2 * change for n, change in halved.extra.items()}) <= 1e-12
    # Both are clipped to the same norm afterwards; what is told is the norm of the loss's gradient.
    clipped, also = run("", 0.05), run("half", 0.05)
    assert tensors_apart(clipped.tensors, also.tensors) < 1e-5
    assert also.grad_norms[0] == clipped.grad_norms[0] == plain.grad_norms[0]


def gradients_of(world: Any, size: int) -> dict[str, Tensor]:
    seen: dict[str, Tensor] = {}
    trainer = Trainer(
        build_student,
        forward=lambda model, batch: model(batch["real"]),
        loss=lambda output, batch: (output.square().sum(), len(output)),
        optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.1),
        dtype="fp64",
        microbatch_size=2,
    )
    trainer.on_gradients(lambda named: seen.update({name: g.clone() for name, g in named.items()}))
    for share in trainer.loader(Samples(), global_batch_size=size, shuffle=False):
        trainer.step(share)
        break
    return seen


def test_gradients_come_by_full_name_and_are_the_same_on_all_ranks(ranks: Pool) -> None:
    one = ranks.run(gradients_of, nproc=1, args=(9,))[0]
    assert sorted(one) == ["0.bias", "0.weight", "3.bias", "3.weight"]
    for nproc in (2, 3):
        for seen in ranks.run(gradients_of, nproc=nproc, args=(9,)):
            assert tensors_apart(one, seen) <= 1e-12


def build_from(world: Any, kind: str) -> list[Tensor]:
    """Build from a factory, which is seeded identically everywhere, or a model, whose rank 0 counts."""
    torch.manual_seed(world.rank)
    model: Callable[[], nn.Module] | nn.Module = build_student if kind == "factory" else build_student()
    before = torch.random.get_rng_state()
    trainer = Trainer(
        model,
        loss=lambda output, batch: output.mean(),
        optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.1),
        seed=5,
    )
    assert torch.equal(torch.random.get_rng_state(), before), "the generators are left alone"
    return [p.detach().clone() for p in trainer.model.parameters()]


def test_a_factory_gives_the_same_model_on_any_number_of_ranks(ranks: Pool) -> None:
    one = ranks.run(build_from, nproc=1, args=("factory",))[0]
    for nproc in (2, 3):
        for weights in ranks.run(build_from, nproc=nproc, args=("factory",)):
            assert all(map(torch.equal, one, weights))
    torch.manual_seed(0)
    rank_0s = [p.detach() for p in build_student().parameters()]
    for weights in ranks.run(build_from, args=("module",)):
        assert all(map(torch.equal, rank_0s, weights))


def draws(world: Any) -> dict[tuple[int, str, int], float]:
    """Return a number drawn in each forward, by step, update and first sample."""
    seen: dict[tuple[int, str, int], float] = {}

    def loss(name: str) -> Any:
        def compute(models: dict[str, nn.Module], batch: list[Tensor]) -> Any:
            seen[trainer.step_number, name, int(batch[0][0])] = float(torch.rand(()))
            return models["a"](batch[1]).square().sum() + models["b"](batch[1]).square().sum(), len(batch[1])

        return compute

    def step(update: Any) -> None:
        for name, model in (("first", "a"), ("second", "b"), ("third", "a")):
            update(model, loss(name))

    def sgd(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for _, p in named], lr=0.01)

    trainer = Trainer(
        {"a": nn.Linear(2, 1), "b": nn.Linear(2, 1)},
        optimizer={"a": sgd, "b": sgd},
        step=step,
        microbatch_size=3,
    )
    data = torch.utils.data.TensorDataset(torch.arange(18), torch.randn(18, 2))
    for share in trainer.loader(data, global_batch_size=9, shuffle=False):
        trainer.step(share)
    return seen


def test_random_numbers_differ_by_step_update_and_microbatch_alone(ranks: Pool) -> None:
    (one,) = ranks.run(draws, nproc=1)
    assert len(set(one.values())) == len(one) == 2 * 3 * 3
    for nproc in (2, 4):
        together: dict[tuple[int, str, int], float] = {}
        for seen in ranks.run(draws, nproc=nproc):
            together |= seen
        assert together == one
