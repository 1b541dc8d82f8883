"""A checkpoint of one layout is loaded under another: the same bits, and the same run from there on."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import paceline
from paceline.models.gpt import Gpt
from paceline.recipe.schema import GptModel
from tests.dist.pool import Pool, RankError
from tests.train.test_layouts import Tokens, distance

GLOBAL_BATCH = 10
Named = list[tuple[str, nn.Parameter]]


def build_gpt(num_ids: int = 64, layers: int = 2) -> nn.Module:
    section = GptModel(kind="gpt", layers=layers, hidden=32, heads=4, kv_heads=2, dropout=0.2)
    return Gpt(section, num_ids, 8)


def build_frozen() -> nn.Module:
    model = build_gpt()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layers.0" not in name)
    return model


def build_tied_llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attention_dropout=0.2,
        tie_word_embeddings=True,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def fused(named: Named) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for _, p in named], lr=1e-2, fused=True)


def plain(named: Named) -> torch.optim.Optimizer:
    decayed = [p for _, p in named if p.dim() > 1 and p.requires_grad]
    others = [p for _, p in named if p.dim() <= 1 and p.requires_grad]
    groups = [{"params": others, "weight_decay": 0.0}, {"params": decayed}]
    return torch.optim.AdamW(groups, lr=1e-2, foreach=False, amsgrad=True)


def momentum(named: Named) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named if p.requires_grad], lr=0.1, momentum=0.9, nesterov=True)


def run(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    output = model(batch["ids"][:, :-1])
    logits: Tensor = output if isinstance(model, Gpt) else output.logits
    return logits


def next_token_loss(logits: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    targets = batch["ids"][:, 1:]
    losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    return losses, torch.tensor(float(targets.numel()))


def build_trainer(
    layout: str, model: Callable[[], nn.Module], optimizer: Any, **settings: Any
) -> paceline.Trainer:
    return paceline.Trainer(
        model,
        forward=run,
        loss=next_token_loss,
        optimizer=optimizer,
        layout=layout,
        example={"ids": torch.zeros(2, 9, dtype=torch.int64)},
        microbatch_size=2,
        clip_norm=0.5,
        **{"dtype": "fp64", "reduction": "fast", **settings},
    )


def read_state(trainer: paceline.Trainer) -> dict[str, Any]:
    """Return all tensors of model and optimizer, whole, by full name; and what else the optimizer has."""
    found: dict[str, Any] = {f"model.{name}": value for name, value in trainer.whole_state().items()}
    tree = trainer._updates["model"].optimizer_state()
    for name, each in tree["parameters"].items():
        for key, value in each["state"].items():
            found[f"optimizer.{name}.{key}"] = value.clone() if isinstance(value, Tensor) else value
    found["groups"] = [{k: v for k, v in g.items() if k not in ("fused", "foreach")} for g in tree["groups"]]
    return found


def go_on(world: Any, layout: str, folder: str, last_step: int, model: Any, optimizer: Any) -> dict[str, Any]:
    trainer = build_trainer(layout, model, optimizer)
    loader = trainer.loader(Tokens(), global_batch_size=GLOBAL_BATCH)
    trainer.resume(folder)
    found: dict[str, Any] = {"start": read_state(trainer), "losses": {}}
    while trainer.step_number < last_step:
        for share in loader:
            step = trainer.step(share)
            found["losses"][step.number] = step.loss
            if step.number == last_step:
                break
    trainer.save()
    found["end"] = read_state(trainer)
    trainer.close()
    return found if world.is_main else {"losses": found["losses"]}


CHAINS = {
    "fused AdamW": (build_gpt, fused, ["dp_shard=4", "tp=2 dp_replicate=2", ""]),
    "tied Llama, AdamW in groups": (
        build_tied_llama,
        plain,
        ["tp=2", "dp_shard=2 zero=1", "dp_shard=2 tp=2", ""],
    ),
    "frozen parameters, SGD": (
        build_frozen,
        momentum,
        ["dp_shard=2 tp=2", "dp_replicate=2 dp_shard=2", "tp=2", "", "dp_shard=2"],
    ),
}


def num_ranks(layout: str) -> int:
    degrees = [word.split("=") for word in layout.split()]
    count = 1
    for name, degree in degrees:
        count *= 1 if name == "zero" else int(degree)
    return count


@pytest.mark.parametrize("chain", CHAINS)
def test_layouts_hand_a_run_over(ranks: Pool, tmp_path: Any, chain: str) -> None:
    model, optimizer, layouts = CHAINS[chain]
    last_step = 2 * len(layouts)
    (one,) = ranks.run(go_on, 1, ("", str(tmp_path / "one"), last_step, model, optimizer), timeout_s=60)
    before: dict[str, Any] = {}
    for number, layout in enumerate(layouts, start=1):
        args = (layout, str(tmp_path / "many"), 2 * number, model, optimizer)
        results = ranks.run(go_on, num_ranks(layout), args, timeout_s=120)
        if before:
            assert_equal(results[0]["start"], before)
        before = results[0]["end"]
        for result in results:
            for step, loss in result["losses"].items():
                assert loss == pytest.approx(one["losses"][step], rel=1e-11)
    assert before.keys() == one["end"].keys()
    assert distance(
        {k: v for k, v in before.items() if isinstance(v, Tensor)},
        {k: v for k, v in one["end"].items() if isinstance(v, Tensor)},
    ) < 1e-8  # fmt: skip


def assert_equal(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        if isinstance(value, Tensor):
            assert torch.equal(value, other[name]), name
            assert value.dtype == other[name].dtype, name
        else:
            assert value == other[name], name


def build_small() -> nn.Module:
    return build_gpt(32)


def build_deep() -> nn.Module:
    return build_gpt(64, layers=3)


def test_a_checkpoint_of_another_model_is_refused_alike(ranks: Pool, tmp_path: Any) -> None:
    for name, model in {"small": build_small, "deep": build_deep}.items():
        ranks.run(go_on, 1, ("", str(tmp_path / name), 0, model, fused))
        messages = set()
        for layout in ("", "dp_shard=2", "tp=2"):
            with pytest.raises(RankError) as caught:
                ranks.run(go_on, num_ranks(layout), (layout, str(tmp_path / name), 2, build_gpt, fused))
            assert len(caught.value.causes) == num_ranks(layout)
            messages |= {str(cause) for cause in caught.value.causes.values()}
        assert len(messages) == 1, messages
        (message,) = messages
        assert "PL531" in message
        words = "embed_tokens.weight is (32, 32) there and (64, 32) here" if name == "small" else "layers.2."
        assert words in message


def test_another_optimizer_is_refused_alike(ranks: Pool, tmp_path: Any) -> None:
    ranks.run(go_on, 1, ("", str(tmp_path), 0, build_gpt, fused))
    messages = set()
    for layout in ("", "dp_shard=2", "tp=2"):
        with pytest.raises(RankError) as caught:
            ranks.run(go_on, num_ranks(layout), (layout, str(tmp_path), 2, build_gpt, momentum))
        messages |= {str(cause) for cause in caught.value.causes.values()}
    assert len(messages) == 1, messages
    assert "PL511" in messages.pop()


class Tracker(TorchDispatchMode):
    """The most bytes that tensors made inside have had at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.live_bytes = self.most_bytes = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {id(t.untyped_storage()) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and id(tensor.untyped_storage()) not in before | self._seen:
                self._count(tensor.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, num_bytes = id(storage), storage.nbytes()
        self._seen.add(key)
        self.live_bytes += num_bytes
        self.most_bytes = max(self.most_bytes, self.live_bytes)

        def forget() -> None:
            self._seen.discard(key)
            self.live_bytes -= num_bytes

        weakref.finalize(storage, forget)


def build_for_four() -> nn.Module:
    section = GptModel(kind="gpt", layers=3, hidden=64, heads=8, kv_heads=8, dropout=0.2)
    return Gpt(section, 64, 8)


def measure_memory(world: Any, layout: str, folder: str) -> dict[str, int]:
    trainer = build_trainer(layout, build_for_four, fused)
    loader = trainer.loader(Tokens(), global_batch_size=GLOBAL_BATCH)
    trainer.resume(folder)
    trainer.step(next(iter(loader)))
    whole_bytes = 3 * 8 * sum(t.numel() for t in build_for_four().parameters())
    with Tracker() as saving:
        trainer.save()
    trainer.close()
    again = build_trainer(layout, build_for_four, fused)
    with Tracker() as loading:
        again.resume(folder)
    again.close()
    return {"whole": whole_bytes, "saving": saving.most_bytes, "loading": loading.most_bytes}


@pytest.mark.parametrize("layout", ["dp_shard=4", "tp=4"])
def test_only_main_holds_all_tensors(ranks: Pool, tmp_path: Any, layout: str) -> None:
    main, *others = ranks.run(measure_memory, 4, (layout, str(tmp_path)), timeout_s=60)
    # The counting counts: main has to hold all that is divided, and a rank its part of what it loads.
    assert main["saving"] > 0.7 * main["whole"]
    for other in others:
        # Of what it saves a rank holds some tensors at a time, and of what it loads its part besides.
        assert other["saving"] < main["whole"] / 3
        assert main["whole"] / 4 <= other["loading"] < main["whole"] / 4 + main["whole"] / 3


class Average:
    """A running mean of a model's parameters, as users write it."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.means = {name: p.detach().clone() for name, p in model.named_parameters()}
        self.count = 0

    def update(self) -> None:
        self.count += 1
        for name, parameter in self.model.named_parameters():
            self.means[name].lerp_(parameter.detach(), 0.5)

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "means": {f"module.{name}": mean for name, mean in self.means.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]
        for name, mean in self.means.items():
            mean.copy_(state["means"][f"module.{name}"])


def go_on_with_average(
    world: Any, layout: str, folder: str, tracks_late: bool, mode: str
) -> list[dict[str, Tensor]]:
    """Return the whole means after loading, and after one more step."""
    trainer = build_trainer(layout, build_gpt, fused, checkpoint_mode=mode)
    average = Average(trainer.model)
    loader = trainer.loader(Tokens(), global_batch_size=GLOBAL_BATCH)
    if not tracks_late:
        trainer.track(average=average)
    trainer.resume(folder)
    if tracks_late:
        trainer.track(average=average)
    found = [{name: trainer.whole(name, mean).clone() for name, mean in average.means.items()}]
    trainer.step(next(iter(loader)))
    average.update()
    trainer.save()
    assert average.count == trainer.step_number
    found.append({name: trainer.whole(name, mean).clone() for name, mean in average.means.items()})
    trainer.close()
    return found


@pytest.mark.parametrize("mode", ["full", "sharded"])
def test_an_average_of_weights_is_saved_whole(ranks: Pool, tmp_path: Any, mode: str) -> None:
    before: dict[str, Tensor] = {}
    for number, layout in enumerate(["tp=2", "dp_shard=2", "", "tp=2 dp_shard=2"]):
        args = (layout, str(tmp_path), number % 2 == 1, mode)
        results = ranks.run(go_on_with_average, num_ranks(layout), args, timeout_s=60)
        for start, _ in results if number else []:
            assert_equal(start, before)
        before = results[0][1]
