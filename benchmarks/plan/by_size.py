"""Derives the tables of layouts that tutorials print: which layout is fastest by model size and cluster.

    python benchmarks/plan/by_size.py > benchmarks/plan/by_size.txt

Llama-shaped models, embedding and head apart, in bf16 with AdamW in fp32, sequences of 2,048 tokens, 512
samples per step, microbatches of one, the fast reduction. A row has the fastest layout that fits, its step,
and how much slower the fastest layout of the next kind is.

Behind that, rules of thumb: throughput of a rank under dp_replicate over that of one rank alone, and how much
longer a step takes under dp_shard, with 4 x 2,048 tokens per rank.
"""

from __future__ import annotations

from paceline.plan.cluster import read_cluster
from paceline.plan.fit import load_constants
from paceline.plan.recipe_costs import of_recipe
from paceline.plan.search import search
from paceline.plan.step import StepModel
from paceline.recipe import Layout, Recipe, Rules, parse_recipe

MODELS = {
    "125M": (12, 768, 12), "1.3B": (24, 2048, 16), "7B": (32, 4096, 32), "13B": (40, 5120, 40),
    "70B": (80, 8192, 64), "175B": (96, 12288, 96),
}  # fmt: skip
CLUSTERS = (
    "1 H100-80",
    "8 H100-80",
    "8 nodes of 8 H100-80, 400 Gbit/s",
    "8 nodes of 8 H100-80, 12.5 Gbit/s",
    "64 nodes of 8 H100-80, 400 Gbit/s",
)
SMALL = {"9M": (2, 128, 4), "35M": (6, 384, 6)}
RULES = (*CLUSTERS[1:4], "8 nodes of 1 H100-80, 25 Gbit/s")


def make(sizes: tuple[int, int, int], samples: int, microbatch: int) -> Recipe:
    """Return the recipe of a model."""
    layers, hidden, heads = sizes
    model = {"kind": "gpt", "layers": layers, "hidden": hidden, "heads": heads, "tie_embeddings": False}
    data = {"kind": "text", "seq_len": 2048, "tokenizer": "bpe", "vocab_size": 32000}
    train = {"steps": 1, "global_batch_size": samples, "microbatch_size": microbatch, "dtype": "bf16"}
    return parse_recipe({"model": model, "data": data, "train": train | {"reduction": "fast"}})


def main() -> None:
    """Print the tables."""
    fit = load_constants()
    for words in CLUSTERS:
        print(f"\n{words}")
        for name, sizes in MODELS.items():
            recipe = make(sizes, 512, 1)
            found = search(of_recipe(recipe), Rules.of(recipe), read_cluster(words, fit.links), fit)
            if not found.fitting:
                assert found.smallest is not None
                least = f"{found.smallest.layout}: {found.smallest.demand.high / 1e9:.0f} GB"
                print(f"  {name:<5} nothing fits; {least}")
                continue
            first, *others = found.best_by_family
            more = f"{others[0].family} {others[0].seconds / first.seconds - 1:+.0%}" if others else ""
            print(f"  {name:<5} {first.seconds:>7.2f} s  {first.layout}  ({more})", flush=True)
    print("\nefficiency of dp_replicate; longer under dp_shard with zero=3, with zero=2")
    for words in RULES:
        print(f"\n{words}")
        cluster = read_cluster(words, fit.links)
        ranks = cluster.num_ranks
        for name, sizes in [*SMALL.items(), *list(MODELS.items())[:3]]:
            alone = StepModel(of_recipe(make(sizes, 4, 4)), cluster, fit).time(Layout(dp_replicate=1))
            step = StepModel(of_recipe(make(sizes, 4 * ranks, 4)), cluster, fit)
            whole = step.time(Layout(dp_replicate=ranks))
            shards = [step.time(Layout(dp_replicate=1, dp_shard=ranks, zero=zero)) for zero in (3, 2)]
            longer = ", ".join(f"{each.total / whole.total - 1:+.0%}" for each in shards)
            print(f"  {name:<5} {alone.total / whole.total:>4.0%}; {longer}")


if __name__ == "__main__":
    main()
