"""Compares planned memory with the storages of tensors that real steps have at their fullest, on CPU ranks.

    python benchmarks/plan/storages.py [MODEL ...]     # measures the layouts that storages.jsonl lacks
    python benchmarks/plan/storages.py --report        # plans all anew; writes residuals.csv
    python benchmarks/plan/storages.py --report all    # a line for each layout

Each model is trained for three steps under every legal layout of 1 and 2 ranks (with each recompute), and
those of 4 ranks that have several axes. In the third step, all storages that exist before it, and those that
operations make, count as long as they live; the most at once is compared with the plan of the rank that has
most, without the libraries. Models are small: only the arithmetic is tested. Under ep, tokens choose their
experts in turn, so that these are equally full.
"""

from __future__ import annotations

import gc
import itertools
import json
import math
import statistics
import sys
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import paceline
from paceline.bench.traced import trace_costs
from paceline.data.task import build_data
from paceline.launching.local import launch
from paceline.models.moe import Balance
from paceline.plan.cluster import Cluster, Processor
from paceline.plan.costs import ModelCosts
from paceline.plan.demand import Demands
from paceline.plan.recipe_costs import of_recipe
from paceline.recipe import Layout, Recipe, Rules, load_recipe
from paceline.recipe.layout import CHOICES
from paceline.torch_seams.tensors import is_fake
from paceline.train.run import build_loader, build_trainer

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
RANKS = (1, 2, 4)
SAMPLES, MICROBATCHES, TOKENS, VOCAB = 4, 2, 128, 512
# What a cluster has beside memory makes no difference here.
CPU = Processor("cpu", {4: 1e10}, 1.0, 1e10, 1e10, 1e-6)
CLUSTER = Cluster(1, max(RANKS), CPU, None, None)
ROWS = HERE / "storages.jsonl"


@dataclass(frozen=True)
class Model:
    """A way to build a model, and its input."""

    build: Any
    is_image: bool = False

    def make_batch(self, samples: int) -> dict[str, Tensor]:
        if self.is_image:
            return {"pixel_values": torch.randn(samples, 3, 64, 64)}
        return {"input_ids": torch.randint(VOCAB, (samples, TOKENS))}

    def find_loss(self, output: Tensor, batch: dict[str, Tensor]) -> Tensor:
        if self.is_image:
            return functional.cross_entropy(output, torch.zeros(len(output), dtype=torch.int64))
        return functional.cross_entropy(output.flatten(0, 1), batch["input_ids"].flatten())

    def forward(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return model(**batch).logits


def _hf(name: str, config: str, **words: Any) -> nn.Module:
    import transformers

    sizes = getattr(transformers, config)(**words, attn_implementation="sdpa")
    return getattr(transformers, name)(sizes)


class Lora(nn.Module):
    """A frozen matrix, and two narrow ones that learn beside it (Hu et al. 2021)."""

    def __init__(self, whole: nn.Linear, rank: int = 8) -> None:
        super().__init__()
        self.whole = whole.requires_grad_(False)
        self.down = nn.Linear(whole.in_features, rank, bias=False)
        self.up = nn.Linear(rank, whole.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.whole(x) + self.up(self.down(x))
        return out


def _adapt(build: Callable[[], nn.Module]) -> nn.Module:
    model = build().requires_grad_(False)
    for layer in model.model.layers:  # type: ignore[union-attr]
        attention: Any = layer.self_attn
        attention.q_proj, attention.v_proj = Lora(attention.q_proj), Lora(attention.v_proj)
    return model


WIDTHS = {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 384}
MODELS: dict[str, Model] = {
    "llama": Model(
        partial(_hf, "LlamaForCausalLM", "LlamaConfig", vocab_size=VOCAB, **WIDTHS, use_cache=False)
    ),
    "gpt2": Model(
        partial(
            _hf, "GPT2LMHeadModel", "GPT2Config", vocab_size=VOCAB, n_positions=TOKENS, n_embd=128, n_layer=4,
            n_head=4, use_cache=False, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )
    ),
    "bert": Model(
        partial(
            _hf, "BertForMaskedLM", "BertConfig", vocab_size=VOCAB, **WIDTHS, hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    ),
    "vit": Model(
        partial(
            _hf, "ViTForImageClassification", "ViTConfig", **WIDTHS, image_size=64, patch_size=8,
            num_labels=10, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        ),
        is_image=True,
    ),
}  # fmt: skip


MODELS["lora"] = Model(partial(_adapt, MODELS["llama"].build))


class Meter(TorchDispatchMode):
    """Counts the bytes of storages as long as they live; `most` is the most at once since it was entered."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}
        self.total = self.most = 0
        for thing in gc.get_objects():
            if issubclass(type(thing), Tensor):
                self._note(thing)

    def __enter__(self) -> Any:
        resize = torch.UntypedStorage.resize_

        def note(storage: torch.UntypedStorage, size: int) -> None:  # as gathered parameters are freed
            resize(storage, size)
            self._set(storage)

        torch.UntypedStorage.resize_ = note  # type: ignore[method-assign, assignment]
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        del torch.UntypedStorage.resize_

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented  # its operations on local tensors come next
        results = function(*args, **(kwargs or {}))
        for one in tree_leaves(results):
            if isinstance(one, Tensor):
                self._note(one)
        return results

    def _note(self, tensor: Tensor) -> None:
        local = getattr(tensor, "_local_tensor", tensor)
        if local.device.type != "meta" and not is_fake(local):
            self._set(local.untyped_storage())

    def _set(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self.sizes:
            weakref.finalize(storage, self._drop, key)
        self.total += storage.nbytes() - self.sizes.get(key, 0)
        self.sizes[key] = storage.nbytes()
        self.most = max(self.most, self.total)

    def _drop(self, key: int) -> None:
        self.total -= self.sizes.pop(key)


OWN = {
    "gpt": ("gpt-stdlib", ["model.hidden=128", "data.seq_len=256"]),
    "encoder": ("encoder-dropout", []),
    "moe": ("moe-stdlib", []),
    "resnet": ("resnet-digits", []),
}


def list_layouts(name: str, ranks: int) -> list[str]:
    _, rules = describe(name, ranks)
    legal = rules.enumerate(ranks, CHOICES["recompute"])[0]
    few = (each for each in legal if each.recompute == "none" and len(each.list_several()) > 1)
    return [str(layout) for layout in (few if ranks > 2 else legal)]


def describe(name: str, ranks: int) -> tuple[ModelCosts, Rules]:
    """Return a model's costs and rules: of a recipe by arithmetic, of another model by a trace."""
    if name in OWN:
        recipe = load_own(name)
        return of_recipe(recipe), Rules.of(recipe)
    model = MODELS[name]
    with torch.device("meta"):
        built = model.build()
    example = model.make_batch(SAMPLES)
    return trace_costs(built.train(), example, SAMPLES, SAMPLES * MICROBATCHES * ranks)


def load_own(name: str, layout: str = "") -> Recipe:
    file, settings = OWN[name]
    settings = [*settings, "train.device='cpu'", "train.reduction='fast'"]
    recipe = load_recipe(str(ROOT / "recipes" / f"{file}.toml"), settings)
    return recipe.with_layout(Layout.parse(layout)) if layout else recipe


def measure(name: str, layouts: list[str]) -> None:
    """Train under each layout, and add a row with the most bytes of a rank, or the code of a refusal."""
    with paceline.start(device="cpu", threads_per_rank=1) as world:
        for layout in layouts:
            torch.manual_seed(0)
            value: float | str
            try:
                value = measure_one(name, layout)
            except paceline.PacelineError as error:
                value = str(error.code)
            gc.collect()
            if world.is_main:
                with ROWS.open("a", encoding="utf-8") as file:
                    row = {"model": name, "ranks": world.world_size, "layout": layout, "bytes": value}
                    file.write(json.dumps(row) + "\n")


def measure_one(name: str, layout: str) -> float:
    """Return the most bytes of a rank in a step under a layout; collective."""
    gc.collect()
    before = Meter().total
    steps, given = _train_own(name, layout) if name in OWN else _train(MODELS[name], layout)
    # A stage of pp follows the functions of its trial forward.
    even = patch.object(Balance, "forward", _choose_in_turn) if "ep=" in layout else nullcontext()
    with even:
        most = _find_most(*steps)
    most = torch.tensor(float(most - before - given))
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return float(most)


def _find_most(*steps: Callable[[], object]) -> int:
    """Return the most bytes in the third step."""
    steps[0]()
    gc.collect()
    with Meter() as meter:
        steps[1]()  # shows it the buckets of DDP, which no Python object holds
        gc.collect()
        meter.most = meter.total
        steps[2]()
    return meter.most


def _load_steps(trainer: paceline.Trainer, loader: Iterable[Any]) -> tuple[list[Callable[[], object]], int]:
    """Return three steps, and the bytes of their batches, which a plan leaves out: the host holds them."""
    before = Meter().total
    steps = [partial(trainer.step, batch) for batch in itertools.islice(loader, 3)]
    gc.collect()
    return steps, Meter().total - before


def _train(model: Model, layout: str) -> tuple[list[Callable[[], object]], int]:
    """Return steps to call, and the bytes of the data."""
    share = SAMPLES * MICROBATCHES * dist.get_world_size()
    trainer = paceline.Trainer(
        model.build(),
        forward=model.forward,
        loss=model.find_loss,
        optimizer=lambda named: torch.optim.AdamW([p for _, p in named if p.requires_grad], lr=1e-4),
        layout=layout,
        microbatch_size=SAMPLES,
        reduction="fast",
        example=model.make_batch(2),
    )
    samples = [{key: value[0] for key, value in model.make_batch(1).items()} for _ in range(4 * share)]
    steps, loaded = _load_steps(trainer, trainer.loader(samples, global_batch_size=share))
    return steps, loaded + sum(value.nbytes for each in samples for value in each.values())


def _choose_in_turn(_: Balance, chances: Tensor) -> Tensor:
    """Return numbers by which all experts of a mixture get equally many tokens, as a plan takes it."""
    tokens, experts = (torch.arange(size, device=chances.device) for size in chances.shape)
    return -((experts - tokens[:, None]) % len(experts)).type_as(chances)


def _train_own(name: str, layout: str) -> tuple[list[Callable[[], object]], int]:
    recipe = load_own(name, layout)
    before = Meter().total
    data = build_data(recipe)
    given = Meter().total - before
    trainer = build_trainer(recipe, data, 100)
    steps, loaded = _load_steps(trainer, build_loader(recipe, trainer, data.train, train=True))
    return steps, loaded + given


def report(*, every: bool) -> None:
    """Print the error of each model's plans."""
    from quantiles import write_residuals

    groups: dict[str, list[tuple[float, str]]] = defaultdict(list)
    left: dict[str, int] = defaultdict(int)
    demands: dict[tuple[str, int], Demands] = {}
    for row in map(json.loads, ROWS.read_text().splitlines()):
        name, ranks = key = row["model"], row["ranks"]
        if key not in demands:
            demands[key] = Demands(describe(*key)[0], CLUSTER)
        if isinstance(row["bytes"], str):
            left[row["bytes"]] += 1
            continue
        demand = demands[key].count(Layout.parse(row["layout"]).resolve(ranks))
        error = (demand.total - demand.terms["libraries"]) / row["bytes"] - 1
        groups[name].append((error, row["layout"]))
        if every:
            words = ", ".join(f"{term} {size / 1e6:.1f}" for term, size in demand.terms.items())
            print(f"{name:<8}{error:>+7.1%} of {row['bytes'] / 1e6:.1f} MB {row['layout']}: {words}")
    write_residuals(
        "storages", ((name, math.log1p(error)) for name, own in groups.items() for error, _ in own)
    )
    print(f"{'model':<8}{'layouts':>8}{'median':>8}{'p90':>6}{'worst':>7}  under")
    for name, errors in [*groups.items(), ("all", [each for group in groups.values() for each in group])]:
        sizes = sorted(abs(error) for error, _ in errors)
        worst = max(errors, key=lambda each: abs(each[0]))
        median, most = statistics.median(sizes), sizes[int(0.9 * len(sizes))]
        print(f"{name:<8}{len(errors):>8}{median:>8.1%}{most:>6.0%}{worst[0]:>+7.0%}  {worst[1]}")
    print("not trained: " + (", ".join(f"{n} {code}" for code, n in left.items()) or "none"))


def main(words: list[str]) -> None:
    if words[:1] == ["--report"]:
        report(every=words[1:] == ["all"])
        return
    rows = [json.loads(line) for line in ROWS.read_text().splitlines()] if ROWS.exists() else []
    done = {(row["model"], row["ranks"], row["layout"]) for row in rows}
    for ranks, name in itertools.product(RANKS, words or [*OWN, *MODELS]):
        layouts = [each for each in list_layouts(name, ranks) if (name, ranks, each) not in done]
        if layouts:
            launch(measure, ranks, (name, layouts), hang_after_s=None)


if __name__ == "__main__":
    main(sys.argv[1:])
