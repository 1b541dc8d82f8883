"""Pipelines train with the bits of one process: any model, schedule and checkpoint."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import paceline
from benchmarks.foreign_models.models import MODELS as FOREIGN
from benchmarks.foreign_models.models import SMALL
from paceline.checkpoint import hash_tensors
from tests.dist.pool import Pool, RankError
from tests.parallel.stages.models import MODELS, Outside, call, make_batch, measure
from tests.train.test_layout_checkpoints import build_gpt, next_token_loss, run

TWO = ("pp=2", "pp=2 schedule=gpipe", "pp=2 schedule=interleaved chunks=2", "pp=2 schedule=bfs chunks=2")
DIVIDED = ("pp=2 schedule=zero_bubble", "pp=2 schedule=zbv")
FOUR = (
    "pp=4 schedule=zero_bubble",
    "pp=2 dp_replicate=2",
    "pp=2 dp_replicate=2 schedule=interleaved chunks=2",
)


def build(layout: str, model: Any, **settings: Any) -> paceline.Trainer:
    return paceline.Trainer(
        model,
        **{
            "forward": call,
            "loss": measure,
            "optimizer": lambda named: torch.optim.AdamW([p for _, p in named], lr=1e-2, fused=True),
            "layout": layout,
            "example": make_batch(0),
            "microbatch_size": 2,
            "clip_norm": 0.5,
            **settings,
        },
    )


class Series(torch.utils.data.Dataset[Any]):
    """Two global batches of 11, whose microbatches of 2 have a ragged one."""

    def __len__(self) -> int:
        return 22

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        batch = make_batch(index // 11)
        return {key: tensor[index % 11] for key, tensor in batch.items()}


def train(world: Any, model: Any, layouts: tuple[str, ...], dtype: str = "fp32") -> list[Any]:
    """Return losses, norms and a hash of all weights after two steps, per layout."""
    found = []
    for layout in layouts:
        trainer = build(layout, model, dtype=dtype)
        loader = trainer.loader(Series(), global_batch_size=11)
        steps = [trainer.step(share) for share in loader]
        state = trainer.whole_state()
        hashed = hash_tensors(state) if world.is_main else ""
        found.append((hashed, *[(step.loss, step.grad_norm) for step in steps]))
        trainer.close()
    return found


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        *[("Tied", layout) for layout in (*TWO, *DIVIDED)],
        *[(name, layout) for name in MODELS if name != "Tied" for layout in (TWO[2], DIVIDED[0])],
    ],
)
def test_models_that_are_hard_to_cut_keep_their_bits(ranks: Pool, name: str, layout: str) -> None:
    [alone] = ranks.run(train, 1, (MODELS[name], ("",)))[0]
    assert ranks.run(train, 2, (MODELS[name], (layout,)))[0] == [alone]


@pytest.mark.parametrize("layout", FOUR)
def test_pipelines_of_four_ranks_keep_their_bits(ranks: Pool, layout: str) -> None:
    dtype = "bf16" if layout == FOUR[1] else "fp32"
    [alone] = ranks.run(train, 1, (Outside, ("",), dtype))[0]
    assert ranks.run(train, 4, (Outside, (layout,), dtype))[0] == [alone]


def test_counts_in_buffers_are_those_of_one_process(ranks: Pool) -> None:
    [alone] = ranks.run(train, 1, (Counts, ("",)))[0]
    layouts = ("pp=2", "pp=2 schedule=zbv", "dp_replicate=2")
    assert ranks.run(train, 2, (Counts, layouts))[0] == [alone] * len(layouts)


BY_HAND = ("stages=blocks.3", "stages=leave", "schedule=zbv stages=blocks.1+blocks.2+leave")


def test_stages_by_hand_keep_the_bits(ranks: Pool) -> None:
    [alone] = ranks.run(train, 1, (Outside, ("",)))[0]
    layouts = tuple(f"pp=2 {words}" for words in BY_HAND)
    assert ranks.run(train, 2, (Outside, layouts))[0] == [alone] * len(BY_HAND)


def hold(world: Any, stages: str) -> set[str]:
    trainer = build(f"pp=2 stages={stages}", Outside)
    return {name.split(".")[0] for name, p in trainer.model.named_parameters() if not p.is_meta}


def test_a_stage_begins_where_it_is_told_to(ranks: Pool) -> None:
    assert ranks.run(hold, 2, ("leave",)) == [{"enter", "position", "blocks"}, {"leave"}]


class Ids(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 22

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"ids": torch.randint(0, 64, (9,), generator=torch.Generator().manual_seed(index))}


def deep_gpt() -> nn.Module:
    return build_gpt(layers=4)


def go_on(world: Any, layout: str, folder: str, last_step: int, mode: str, fused: bool = True) -> Any:
    """Go on from the newest checkpoint to a step, save, and evaluate 7 samples."""
    trainer = build(
        layout,
        deep_gpt,
        forward=run,
        loss=next_token_loss,
        example={"ids": torch.zeros(2, 9, dtype=torch.int64)},
        checkpoint_mode=mode,
        optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=1e-2, fused=fused),
    )
    loader = trainer.loader(Ids(), global_batch_size=11, name="train")
    trainer.resume(folder)
    while trainer.step_number < last_step:
        for share in loader:
            trainer.step(share)
            if trainer.step_number == last_step:
                break
    trainer.save()
    valid = torch.utils.data.Subset(Ids(), range(7))
    evaluated = trainer.evaluate(trainer.loader(valid, global_batch_size=8, shuffle=False, name="valid"))
    state = trainer.whole_state()
    trainer.close()
    return evaluated.loss, hash_tensors(state) if world.is_main else ""


def test_a_run_goes_on_under_any_pipeline(ranks: Pool, tmp_path: Path) -> None:
    """Whole and sharded checkpoints of tied weights, saved and loaded by pipelines and one process."""
    undisturbed = ranks.run(go_on, 1, ("", str(tmp_path / "alone"), 4, "full"))[0]
    folder = str(tmp_path / "moved")
    ranks.run(go_on, 2, ("pp=2", folder, 1, "sharded"))
    ranks.run(go_on, 1, ("", folder, 2, "full"))
    ranks.run(go_on, 2, ("pp=2 schedule=interleaved chunks=2", folder, 3, "full"))
    assert ranks.run(go_on, 2, ("pp=2 schedule=gpipe", folder, 4, "sharded"))[0] == undisturbed


def count_bytes(world: Any) -> tuple[set[str], int, int]:
    trainer = build("pp=2", deep_gpt, forward=run, loss=next_token_loss, example=GPT_EXAMPLE)
    trainer.step({"ids": torch.zeros(4, 9, dtype=torch.int64)})
    named = dict(trainer.model.named_parameters())
    held = {name for name, parameter in named.items() if not parameter.is_meta}
    optimizer = trainer._updates["model"].optimizer
    state = sum(
        value.untyped_storage().nbytes()
        for each in optimizer.state.values()
        for value in each.values()
        if value.dim()
    )
    return held, sum(named[name].untyped_storage().nbytes() for name in held), state


GPT_EXAMPLE = {"ids": torch.zeros(2, 9, dtype=torch.int64)}


def test_a_rank_holds_its_stage_alone(ranks: Pool) -> None:
    sizes = {name: 4 * parameter.numel() for name, parameter in deep_gpt().named_parameters()}
    found = ranks.run(count_bytes, 2)
    both = found[0][0] & found[1][0]
    assert both == {"embed_tokens.weight"}, "the head is the embedding"
    assert found[0][0] | found[1][0] == sizes.keys()
    for held, parameters, state in found:
        assert parameters == sum(sizes[name] for name in held)
        assert state == 2 * parameters, "two moments of AdamW"


def lengths(world: Any, layout: str) -> list[float]:
    trainer = build(layout, deep_gpt, forward=run, loss=next_token_loss, example=GPT_EXAMPLE)
    batches = [torch.arange(3 * n).view(3, n) % 64 for n in (9, 5, 8)]
    steps = [trainer.step({"ids": ids}) for ids in batches]
    batches = [torch.full((1, 6), 3)]  # fewer microbatches than stages
    return [step.loss for step in [*steps, *(trainer.step({"ids": ids}) for ids in batches)]]


def test_lengths_differ_between_steps(ranks: Pool) -> None:
    assert ranks.run(lengths, 2, ("pp=2",))[0] == ranks.run(lengths, 1, ("",))[0]


def compute_alone(world: Any) -> None:
    trainer = build("pp=2", Outside)
    with trainer.without_communication():
        pass


def test_a_step_without_communication_is_refused(ranks: Pool) -> None:
    with pytest.raises(RankError) as caught:
        ranks.run(compute_alone, 2)
    assert getattr(next(iter(caught.value.causes.values())), "code", "") == "PL488"


def skip_one(world: Any) -> list[Any]:
    trainer = build("pp=2", Outside)
    if world.rank == 1:
        weight = dict(trainer.model.named_parameters())["leave.weight"]
        hook = weight.register_hook(lambda gradient: gradient * float("inf"))
    first = trainer.step(make_batch(1))
    if world.rank == 1:
        hook.remove()
    return [first.skipped, trainer.step(make_batch(2)).skipped]


def test_a_gradient_that_is_not_finite_skips_the_step_on_all_stages(ranks: Pool) -> None:
    for skipped in ranks.run(skip_one, 2):
        assert skipped == ["the gradient of leave.weight is not finite", None]


class Decides(Outside):
    def forward(self, x: Tensor) -> Tensor:
        h = self.enter(x)
        for block in self.blocks:
            h = h + block(h) if h.mean() > 0 else h - block(h)
        done: Tensor = self.leave(h)
        return done


class Reads(Outside):
    def forward(self, x: Tensor) -> Tensor:
        h = self.enter(x)
        for block in self.blocks:
            h = h + block(h) * h.mean().item()
        done: Tensor = self.leave(h)
        return done


class Inverts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, block: nn.Module) -> Tensor:
        ctx.block = block
        ctx.save_for_backward(x)
        result: Tensor = block(x)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        raise NotImplementedError


class CallsInFunction(Outside):
    def forward(self, x: Tensor) -> Tensor:
        h = self.enter(x)
        for block in self.blocks:
            h = Inverts.apply(h, block)
        done: Tensor = self.leave(h)
        return done


def count(module: Any, args: Any) -> None:
    module.calls += 1


class Counts(Outside):
    """Counts its forwards, in a buffer of the model itself and in one of a block."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.blocks[1].register_buffer("calls", torch.zeros(()))
        self.blocks[1].register_forward_pre_hook(count)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


class Synchronises(Outside):
    """The layer itself, not converted by a setting."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.SyncBatchNorm(5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.enter(x))
        for block in self.blocks:
            h = h + block(h)
        done: Tensor = self.leave(h)
        return done


class Keeps(Outside):
    def forward(self, x: Tensor) -> Tensor:
        self.kept = self.enter(x)
        h = self.kept
        for block in self.blocks:
            h = block(h)
        done: Tensor = self.leave(h + self.kept)
        return done


class Writes(Outside):
    def forward(self, x: Tensor) -> Tensor:
        first = self.enter(x)
        h = first
        for block in self.blocks:
            h = block(h)
            first.add_(1)
        done: Tensor = self.leave(h + first)
        return done


class Draws(Outside):
    def forward(self, x: Tensor) -> Tensor:
        h = self.enter(x)
        for block in self.blocks:
            h = h + block(h) * torch.rand(h.shape[1], 1)
        done: Tensor = self.leave(h)
        return done


class Collects(Outside):
    def forward(self, x: Tensor) -> Tensor:
        h = self.enter(x)
        found = torch.zeros(len(self.blocks), *h.shape, dtype=h.dtype)
        for number, block in enumerate(self.blocks):
            h = block(h)
            found[number] = h
        done: Tensor = self.leave(found.sum(0))
        return done


class CollectsCopies(Outside):
    def forward(self, x: Tensor) -> Tensor:
        h = self.enter(x)
        found = torch.zeros(len(self.blocks), *h.shape, dtype=h.dtype)
        for number, block in enumerate(self.blocks):
            h = block(h)
            found[number].copy_(h.detach())
        done: Tensor = self.leave(h + found.sum(0))
        return done


class Averages(Outside):
    average: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        h = self.enter(x)
        for block in self.blocks:
            h = block(h)
            self.average.mul_(0.9).add_(h.detach().mean())
        done: Tensor = self.leave(h + self.average)
        return done


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 3))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "a decision": ({"model": Decides}, "PL481", "__bool__"),
    "a value that is read": ({"model": Reads}, "PL481", "(item)"),
    "a layer of SyncBatchNorm": ({"model": Synchronises}, "PL422", "norm is an nn.SyncBatchNorm"),
    "a block in a function": ({"model": CallsInFunction}, "PL485", "Inverts, an autograd.Function"),
    "a tensor on a module": ({"model": Keeps}, "PL484", "'kept'"),
    "in place": ({"model": Writes}, "PL483", "in place"),
    "a draw": ({"model": Draws}, "PL487", "rand"),
    "no example": ({"example": None}, "PL486", "layout.pp=2"),
    "no layers": ({"model": Bare}, "PL491", "calls 0 blocks"),
    "parts of a tensor": ({"model": Collects}, "PL483", "in place"),
    "parts of one without a gradient": ({"model": CollectsCopies}, "PL483", "in place"),
    "a buffer of several stages": ({"model": Averages}, "PL483", "a buffer"),
    "one chunk": ({"layout": "pp=2 schedule=interleaved"}, "PL475", "chunks=1"),
    "chunks without loops": ({"layout": "pp=2 chunks=2"}, "PL475", "chunks=2"),
    "a file with a list": ({"layout": "pp=2 schedule=own.txt"}, "PL118", "schedule=own.txt"),
    "too few names": ({"layout": "pp=2 schedule=zbv stages=blocks.1+blocks.2"}, "PL497", "2 names for 4"),
    "a name of nothing": ({"layout": "pp=2 stages=block.2"}, "PL498", "blocks.2"),
    "inside of a block": ({"layout": "pp=2 stages=blocks.2.up"}, "PL498", "inside of the block blocks.2"),
    "stages that overlap": (
        {"layout": "pp=2 schedule=zbv stages=blocks.1+blocks.1+blocks.2"},
        "PL499",
        "once",
    ),
    "stages backwards": (
        {"layout": "pp=2 schedule=zbv stages=blocks.2+blocks.1+blocks.3"},
        "PL499",
        "blocks.1+blocks.2+blocks.3",
    ),
    "stages without pp": ({"layout": "dp_replicate=2 stages=blocks.2"}, "PL138", "stages=blocks.2"),
    "recompute, with divided backwards": (
        {"layout": "pp=2 schedule=zbv recompute=block"},
        "PL478",
        "schedule=1f1b",
    ),
    "more stages than blocks": (
        {"layout": "pp=2 schedule=bfs chunks=4"},
        "PL491",
        "calls 6 blocks or layers",
    ),
    "misspelt": ({"layout": "pp=2 schedule=1f1"}, "PL118", "schedule=1f1"),
    "compiled, with divided backwards": (
        {"layout": "pp=2 schedule=zbv", "compile": True},
        "PL492",
        "schedule=1f1b",
    ),
    "compiled, with recompute": (
        {"layout": "pp=2 recompute=block", "compile": True},
        "PL492",
        "Leave compile or recompute out",
    ),
    "a schedule without pp": ({"layout": "dp_replicate=2 schedule=gpipe"}, "PL138", "schedule=gpipe"),
    "settings of DDP": ({"ddp": {"find_unused_parameters": True}}, "PL141", "find_unused"),
    "another number of ranks": ({"layout": "pp=3"}, "PL113", "pp=3"),
}


def refuse(world: Any, settings: dict[str, Any]) -> None:
    model = settings.pop("model", Outside)
    layout = settings.pop("layout", "pp=2")
    build(layout, model, **settings)


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_work_is_refused(ranks: Pool, case: str) -> None:
    settings, code, seen = REFUSED[case]
    with pytest.raises(RankError) as caught:
        ranks.run(refuse, 2, (settings,))
    error = next(iter(caught.value.causes.values()))
    assert getattr(error, "code", None) == code, error
    assert seen in str(error)


def refuse_compiled(world: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch's compiler, when it is imported
        model = Outside()
        model.compile()
        build("pp=2", model)


def test_a_model_that_is_compiled_in_place_is_refused(ranks: Pool) -> None:
    with pytest.raises(RankError) as caught:
        ranks.run(refuse_compiled, 2)
    error = next(iter(caught.value.causes.values()))
    assert getattr(error, "code", None) == "PL492", error


def test_compiled_stages_with_tp_are_refused(ranks: Pool) -> None:
    with pytest.raises(RankError, match=r"train.compile=true and layout.tp=2.*PL492"):
        ranks.run(refuse, 4, ({"layout": "pp=2 tp=2", "compile": True},))


class Alternates(Outside):
    """Every second forward calls one function more."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        h = self.enter(x)
        for block in self.blocks:
            h = h + block(h)
        done: Tensor = self.leave(h if self.calls % 2 else torch.tanh(h))
        return done


class Shortens(Outside):
    """A batch of short series is run by fewer blocks."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.enter(x)
        for block in self.blocks[: x.shape[1]]:
            h = h + block(h)
        done: Tensor = self.leave(h)
        return done


class Borrows(Outside):
    """A batch of short series uses a weight of the first stage on the last."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.enter(x)
        for block in self.blocks:
            h = h + block(h)
        if x.shape[1] == 3:
            h = h + self.enter.bias
        done: Tensor = self.leave(h)
        return done


IN_A_STEP: dict[str, tuple[Any, str, str]] = {
    "another path": (Alternates, "PL482", "tanh"),
    "fewer blocks": (Shortens, "PL482", "calls 3 blocks, and that of the example 4"),
    "a weight of another stage": (Borrows, "PL485", "enter.bias, which is on stage 0"),
}


def refuse_in_a_step(world: Any, model: Any) -> None:
    trainer = build("pp=2", model)
    trainer.step(make_batch(1))
    trainer.step({"x": torch.zeros(4, 3, 4), "y": torch.zeros(4, 1, 3)})


@pytest.mark.parametrize("case", IN_A_STEP)
def test_a_step_that_takes_another_path_is_refused(ranks: Pool, case: str) -> None:
    model, code, seen = IN_A_STEP[case]
    with pytest.raises(RankError) as caught:
        ranks.run(refuse_in_a_step, 2, (model,))
    error = next(iter(caught.value.causes.values()))
    assert getattr(error, "code", None) == code, error
    assert seen in str(error)


def refuse_models(world: Any) -> None:
    paceline.Trainer(
        {"teacher": Outside, "student": Outside},
        optimizer={"student": lambda named: torch.optim.SGD([p for _, p in named], lr=0.1)},
        step=lambda update: None,
        layout="pp=2",
        example=make_batch(0),
    )


def test_named_models_are_refused(ranks: Pool) -> None:
    with pytest.raises(RankError, match=r"named models with layout pp=2.*PL423"):
        ranks.run(refuse_models, 2)


def test_all_reasons_come_at_once_with_the_nearest_layouts(ranks: Pool) -> None:
    settings: dict[str, Any] = {
        "layout": "pp=2 dp_shard=2 schedule=zbv recompute=block offload=cpu chunks=3",
        "compile": True,
        "reduction": "fast",
        "shard": {"param_dtype": "bf16"},
    }
    with pytest.raises(RankError) as caught:
        ranks.run(refuse, 4, (settings,))
    error: Any = next(iter(caught.value.causes.values()))
    found = [(problem.code, problem.saw.partition(" with ")[2]) for problem in error.problems]
    for code, word in [
        ("PL475", "chunks"),
        ("PL478", "schedule=zbv"),
        ("PL492", "offload=cpu"),
        ("PL492", "shard.param_dtype"),
        ("PL492", "compile"),
    ]:
        assert any(each == code and word in saw for each, saw in found), (code, word, found)
    assert all(problem.fix for problem in error.problems)


def train_foreign(world: Any, name: str, layout: str) -> Any:
    arguments = FOREIGN[name].verify_arguments(SMALL)
    batch = arguments["batch_fn"](1)
    trainer = build(
        layout, arguments["model_fn"], forward=arguments["forward"], loss=arguments["loss"], example=batch
    )
    step, state = trainer.step(batch), trainer.whole_state()
    return step.loss, step.grad_norm, hash_tensors(state) if world.is_main else ""


# The others, and these under every schedule, are in test_pipeline_models.py.
@pytest.mark.parametrize("name", ["ViT", "nn.Transformer", "Llama, its own loss", "GPT-2, its own loss"])
def test_models_of_others_keep_their_bits(ranks: Pool, name: str) -> None:
    if name != "nn.Transformer":
        pytest.importorskip("transformers", reason="these models are those of transformers")
    alone = ranks.run(train_foreign, 1, (name, ""))[0]
    assert ranks.run(train_foreign, 2, (name, "pp=2"))[0] == alone
    assert ranks.run(train_foreign, 2, (name, "pp=2 schedule=zero_bubble"))[0] == alone
