"""Arguments and models of other tools are explained, or taken for what they mean."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import paceline
from paceline.errors import PacelineError
from paceline.world import start
from tests.dist.pool import Pool


def sgd(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named], lr=0.1)


def build(model: Any = None, **settings: Any) -> paceline.Trainer:
    torch.manual_seed(0)
    settings = {
        "optimizer": sgd,
        "loss": lambda output, batch: (output.square().sum(), len(output)),
    } | settings
    return paceline.Trainer(nn.Linear(4, 4) if model is None else model, **settings)


TRAINER = {
    "gradient_accumulation_steps": "microbatch_size= of Trainer",
    "batch_size": "global_batch_size= of trainer.loader",
    "lr": "optimizer=lambda named",
    "lr_scheduler": "schedule=paceline.schedule(",
    "criterion": "loss=lambda output, batch",
    "mixed_precision": 'dtype="bf16"',
    "max_grad_norm": "clip_norm=1.0",
    "devices": "layout=",
    "gradient_checkpointing": "recompute=block",
    "train_dataloader": "trainer.loader(dataset",
    "max_epochs": "epochs= of trainer.loader",
    "microbatchsize": "use microbatch_size=",
    "xyz": "Leave xyz= out",
}
LOADER = {
    "batch_size": "global_batch_size=",
    "collate_fn": "collate=",
    "sampler": "trainer.loader(DataLoader(",
    "microbatch_size": "Pass microbatch_size= to Trainer.",
}


def test_words_of_other_tools_are_explained() -> None:
    with start(threads_per_rank=1):
        for word, ours in TRAINER.items():
            with pytest.raises(PacelineError) as caught:
                build(**{word: 2})
            assert caught.value.code == "PL929"
            assert ours in caught.value.fix, word
        for word, ours in LOADER.items():
            with pytest.raises(PacelineError) as caught:
                build().loader([1], **{"global_batch_size": 2, word: 2})
            assert caught.value.code == "PL929"
            assert ours in caught.value.fix, word
        for wrong in (
            lambda: paceline.Trainer(nn.Linear(4, 4), sgd, nn.MSELoss()),  # type: ignore[misc]
            lambda: paceline.Trainer(nn.Linear(4, 4)),  # type: ignore[call-arg]
            lambda: build().loader([1], 8),  # type: ignore[misc]
        ):
            with pytest.raises(PacelineError) as caught:
                wrong()
            assert caught.value.code == "PL929"
        with pytest.raises(PacelineError, match="LambdaLR") as caught:
            build(
                schedule=torch.optim.lr_scheduler.LambdaLR(
                    sgd(nn.Linear(2, 2).named_parameters()), lambda n: 1
                )
            )
        assert caught.value.code == "PL400"


@pytest.mark.parametrize(
    ("item", "is_fine"),
    [
        ({"ids": [1, 2, 3]}, False),
        (([1, 2, 3], 0), False),
        ([1, 2, 3], False),
        ({"ids": torch.tensor([1, 2, 3])}, True),
        ([0.5, 1], True),
        ({"names": ["a", "b", "c"]}, True),
        ((1, 2, 3), True),
    ],
)
def test_lists_of_numbers_are_no_samples(item: Any, is_fine: bool) -> None:
    with start(threads_per_rank=1):
        shares = iter(build().loader([item] * 8, global_batch_size=4))
        if is_fine:
            next(shares)
            return
        with pytest.raises(PacelineError, match=r"torch\.tensor") as caught:
            next(shares)
        assert caught.value.code == "PL258"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.head = nn.Linear(4, 4)
        self.register_buffer("positions", torch.arange(4.0), persistent=False)  # not in a state_dict

    def forward(self, x: Any) -> Any:
        return self.head(self.blocks(x + self.positions))


def compiled(kind: str) -> Any:
    torch.manual_seed(1)
    model = Net()
    if kind == "model":
        return torch.compile(model, backend="eager")
    if kind == "blocks":
        for number, block in enumerate(model.blocks):
            model.blocks[number] = torch.compile(block, backend="eager")
        model.blocks = torch.compile(model.blocks, backend="eager")
    return model


@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")  # by torch's compiler itself
def test_compiled_models_keep_their_names(tmp_path: Path) -> None:
    states = []
    for kind in ("model", "blocks", "plain"):
        with start(threads_per_rank=1):
            trainer = build(compiled(kind))
            assert trainer._given.compile == (kind != "plain")
            trainer.resume(tmp_path)  # what the one has saved, the next one loads
            assert list(trainer.whole_state()) == list(Net().state_dict())
            assert trainer.step_number == len(states)
            if kind == "plain":
                trainer.step(torch.ones(4, 4))
            else:
                with torch.compiler.set_stance("force_eager"):
                    trainer.step(torch.ones(4, 4))
            trainer.save(wait=True)
            states.append(trainer._updates["model"].optimizer_state()["parameters"].keys())
    assert states[0] == states[1] == states[2]
    with start(threads_per_rank=1):
        with pytest.raises(PacelineError, match="compile=True") as caught:
            build(lambda: compiled("blocks"))
        assert caught.value.code == "PL929"
        both = paceline.Trainer(
            {"a": compiled("model"), "b": compiled("plain")},
            optimizer={"a": sgd, "b": sgd},
            step=lambda update: None,
        )
        assert list(both.whole_state("a")) == list(both.whole_state("b"))


def wrapped(world: Any) -> list[str]:
    found = []
    for model in (
        DistributedDataParallel(Net()),
        nn.DataParallel(Net()),
        build(Net(), layout="dp_shard=2").model,
    ):
        with pytest.raises(PacelineError, match="laid out already") as caught:
            build(model)
        found.append(caught.value.code)
    return found


def test_models_of_other_tools_are_refused(ranks: Pool) -> None:
    assert ranks.run(wrapped) == [["PL929"] * 3] * 2
