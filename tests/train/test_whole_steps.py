"""Optimizers that need whole tensors train on every layout as in one process; under dp with its bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import paceline
from paceline.checkpoint import hash_tensors
from paceline.errors import PacelineError
from paceline.models.moe import MoeGpt
from paceline.recipe.schema import MoeModel
from paceline.train.muon import StackedMuon
from paceline.train.tasks import balanced_token_loss
from tests.dist.pool import Pool
from tests.train.test_layouts import build_gpt, distance

STEPS, GLOBAL_BATCH, SEQ, VOCAB = 3, 12, 8, 40
Named = list[tuple[str, nn.Parameter]]


def hidden_and_rest(named: Named) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return the matrices of the blocks, and the rest."""
    is_hidden = [p.dim() >= 2 and any(word in name for word in ("layers.", "mixtures.")) for name, p in named]
    both = list(zip(is_hidden, named, strict=True))
    return [p for yes, (_, p) in both if yes], [p for yes, (_, p) in both if not yes]


class Keller(torch.optim.Optimizer):
    """As users write it: Muon for matrices and stacks, momentum for the rest, a count in the group."""

    def __init__(self, named: Named) -> None:
        hidden, rest = hidden_and_rest(named)
        groups = [{"params": hidden, "use_muon": True}, {"params": rest, "use_muon": False}]
        super().__init__(groups, {"lr": 0.02, "k": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["k"] += 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["m"], state["steps"] = torch.zeros_like(p), 0
                state["steps"] += 1
                state["m"].lerp_(p.grad, 0.1)
                update = state["m"]
                if group["use_muon"]:
                    x = update / (update.norm(dim=(-2, -1), keepdim=True) + 1e-7)
                    for _ in range(3):
                        a = x @ x.mT
                        x = 3.4445 * x + (-4.775 * a + 2.0315 * a @ a) @ x
                    update = x
                p.add_(update, alpha=-group["lr"] / group["k"])


def muon_and_adamw(named: Named) -> list[torch.optim.Optimizer]:
    hidden, rest = hidden_and_rest(named)
    return [StackedMuon(hidden, lr=0.02), torch.optim.AdamW(rest, lr=1e-2)]


OPTIMIZERS: dict[str, Callable[[Named], Any]] = {
    "muon": muon_and_adamw,
    "keller": Keller,
    "adafactor": lambda named: torch.optim.Adafactor([p for _, p in named], lr=1e-2),
}


class Odd(nn.Module):
    """Shapes that no number of ranks divides, and fewer rows than ranks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCAB, 6)
        self.layers = nn.ModuleList([nn.Linear(6, 7), nn.Linear(7, 2), nn.Linear(2, 5)])
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.head = nn.Linear(5, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x).tanh()
        return self.scale * self.head(x)


def build_moe() -> nn.Module:
    table = {"kind": "moe", "layers": 2, "hidden": 16, "heads": 2, "experts": 4, "experts_per_token": 2}
    return MoeGpt(MoeModel.model_validate({**table, "expert_hidden": 12}), VOCAB, SEQ)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt": build_gpt,
    "odd": Odd,
    "moe": build_moe,
}


@pytest.fixture
def world() -> Iterator[Any]:
    with paceline.start(threads_per_rank=1) as started:
        yield started


class Tokens:
    def __len__(self) -> int:
        return 64

    def __getitem__(self, place: int) -> dict[str, Tensor]:
        ids = torch.randint(0, VOCAB, (SEQ + 1,), generator=torch.Generator().manual_seed(place))
        return {"ids": ids[:-1], "targets": ids[1:]}


def loss_of(output: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    if hasattr(output, "balance"):
        return balanced_token_loss(output, batch)
    logits = output[0] if isinstance(output, tuple) else output
    targets = batch["targets"]
    losses = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    return losses, torch.tensor(float(targets.numel()))


def build_trainer(model: str, optimizer: str, layout: str, dtype: str) -> paceline.Trainer:
    example = {key: torch.zeros(2, SEQ, dtype=torch.int64) for key in ("ids", "targets")}
    return paceline.Trainer(
        MODELS[model],
        forward=lambda model, batch: model(batch["ids"]),
        loss=loss_of,
        optimizer=OPTIMIZERS[optimizer],
        schedule=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
        layout=layout,
        example=example,
        microbatch_size=2,
        clip_norm=0.5,
        reduction="exact",
        dtype=dtype,  # type: ignore[arg-type]
    )


def train(
    model: str, optimizer: str, layout: str, dtype: str = "fp32", steps: int = STEPS
) -> dict[str, Tensor]:
    trainer = build_trainer(model, optimizer, layout, dtype)
    for share in trainer.loader(Tokens(), global_batch_size=GLOBAL_BATCH):
        if trainer.step(share).number == steps:
            break
    found = trainer.whole_state()
    trainer.close()
    return found


def train_cases(world: Any, cases: list[tuple[str, str, str]]) -> list[str]:
    torch.set_num_threads(1)
    return [hash_tensors(train(*case)) for case in cases]


def train_states(world: Any, cases: list[tuple[str, str, str]]) -> list[dict[str, Tensor]]:
    torch.set_num_threads(1)
    return [train(*case, dtype="fp64") for case in cases]


PAIRS = [("gpt", "muon"), ("odd", "keller"), ("odd", "adafactor"), ("moe", "muon")]


@pytest.mark.parametrize(
    ("nproc", "pairs", "layouts"),
    [
        (2, PAIRS, ["dp_shard=2"]),
        (3, PAIRS[1:3], ["dp_shard=3"]),
        pytest.param(
            2, PAIRS, ["dp_replicate=2", "dp_shard=2 zero=1", "dp_shard=2 zero=2"], marks=pytest.mark.slow
        ),
        pytest.param(4, PAIRS, ["dp_shard=4", "dp_replicate=2 dp_shard=2"], marks=pytest.mark.slow),
    ],
)
def test_the_bits_of_one_process_on_any_dp_layout(
    ranks: Pool, nproc: int, pairs: list[tuple[str, str]], layouts: list[str]
) -> None:
    cases = [(*pair, layout) for layout in layouts for pair in pairs]
    alone = ranks.run(train_cases, 1, ([(*pair, "") for pair in pairs],))[0]
    found = ranks.run(train_cases, nproc, (cases,))[0]
    assert dict(zip(cases, found, strict=True)) == dict(zip(cases, alone * len(layouts), strict=True))


@pytest.mark.parametrize(
    ("nproc", "cases"),
    [
        (2, [("gpt", "keller", "tp=2"), ("moe", "keller", "ep=2 dp_replicate=2")]),
        (
            2,
            [
                ("gpt", "keller", "pp=2"),
                ("gpt", "adafactor", "tp=2"),
                ("moe", "adafactor", "ep=2 dp_shard=2"),
            ],
        ),
        pytest.param(
            4,
            [
                *(
                    ("gpt", name, f"dp_shard=2 {axis}=2")
                    for name in ("keller", "adafactor")
                    for axis in ("tp", "pp")
                ),
                ("moe", "keller", "dp_shard=2 ep=2 tp=2"),
            ],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_one_process_under_every_axis(ranks: Pool, nproc: int, cases: list[tuple[str, str, str]]) -> None:
    pairs = list(dict.fromkeys(case[:2] for case in cases))
    alone = dict(zip(pairs, ranks.run(train_states, 1, ([(*p, "") for p in pairs],))[0], strict=True))
    for case, found in zip(cases, ranks.run(train_states, nproc, (cases,))[0], strict=True):
        assert distance(found, alone[case[:2]]) < 1e-10, case


def go_on(world: Any, optimizer: str, layout: str, folder: str, last: int) -> str:
    torch.set_num_threads(1)
    trainer = build_trainer("odd", optimizer, layout, "fp32")
    loader = trainer.loader(Tokens(), global_batch_size=GLOBAL_BATCH)
    trainer.resume(folder)
    for share in loader:
        if trainer.step(share).number == last:
            break
    trainer.save()
    found = hash_tensors(trainer.whole_state())
    trainer.close()
    return found


@pytest.mark.parametrize("optimizer", ["muon", "adafactor"])
def test_resumes_under_another_layout(ranks: Pool, optimizer: str, tmp_path: Path) -> None:
    folders = [str(tmp_path / name) for name in ("whole", "parts")]
    expected = ranks.run(go_on, 1, (optimizer, "", folders[0], 4))[0]
    ranks.run(go_on, 2, (optimizer, "dp_shard=2", folders[1], 1))
    ranks.run(go_on, 3, (optimizer, "dp_shard=3", folders[1], 2))
    ranks.run(go_on, 1, (optimizer, "", folders[1], 3))
    assert ranks.run(go_on, 2, (optimizer, "dp_shard=2 zero=1", folders[1], 4))[0] == expected


def test_a_plain_loop_is_the_truth(world: Any) -> None:
    """torch's Muon and AdamW over the whole batch in a loop without Paceline."""
    model = Odd().double()
    optimizers = [
        torch.optim.Muon([layer.weight for layer in model.layers], lr=0.02),
        torch.optim.AdamW(hidden_and_rest(list(model.named_parameters()))[1], lr=1e-2),
    ]
    trained = paceline.Trainer(
        Odd(),
        forward=lambda model, batch: model(batch["ids"]),
        loss=loss_of,
        optimizer=muon_and_adamw,
        microbatch_size=2,
        dtype="fp64",
    )
    loader = iter(trained.loader(Tokens(), global_batch_size=GLOBAL_BATCH))
    for _ in range(STEPS):
        share = next(loader)
        batch = {key: torch.cat([each[key] for _, each in share.microbatches]) for key in ("ids", "targets")}
        total, weight = loss_of(model(batch["ids"]), batch)
        (total / weight).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        trained.step(share)
    truth = dict(model.state_dict())
    # Muon's bf16 may round a gradient's last bit to a neighbour.
    assert distance(trained.whole_state(), truth) < 1e-3
    assert distance(trained.whole_state(), Odd().state_dict()) > 1e-2


def test_several_optimizers_are_one(world: Any) -> None:
    model = nn.Linear(3, 3)

    def build(make: Callable[[Named], Any]) -> paceline.Trainer:
        return paceline.Trainer(model, loss=lambda output, batch: output.sum(), optimizer=make)

    def twice(named: Named) -> Any:
        return [torch.optim.SGD([p for _, p in named]), torch.optim.AdamW([named[0][1]])]

    with pytest.raises(PacelineError, match="1 parameters of model are in several") as caught:
        build(twice)
    assert caught.value.code == "PL407"
    with pytest.raises(PacelineError, match="returned a list"):
        build(lambda named: [])


def test_a_parameter_does_not_change_its_optimizer(world: Any, tmp_path: Path) -> None:
    def build(first: slice, second: slice) -> paceline.Trainer:
        return paceline.Trainer(
            nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)),
            forward=lambda model, batch: model(batch["x"]),
            loss=lambda output, batch: output.sum(),
            optimizer=lambda named: [
                torch.optim.SGD([p for _, p in named][first], lr=0.1),
                torch.optim.SGD([p for _, p in named][second], lr=0.1),
            ],
        )

    trainer = build(slice(0, 1), slice(1, 2))
    trainer.resume(tmp_path / "run")
    trainer.save()
    trainer.close()
    with pytest.raises(PacelineError, match="was trained by SGD") as caught:
        build(slice(1, 2), slice(0, 1)).resume(tmp_path / "run")
    assert caught.value.code == "PL511"
