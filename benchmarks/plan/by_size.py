"""Derives the tables of layouts that tutorials print: which layout is fastest by model size and cluster.

    python benchmarks/plan/by_size.py > benchmarks/plan/by_size.txt

Llama-shaped models in bf16 with AdamW in fp32, sequences of 2,048 tokens, 512 samples per step, microbatches
of one, the fast reduction. A row has the fastest layout that fits, its step, and how much slower the fastest
layout of the next kind is.
"""

from __future__ import annotations

from paceline.plan.cluster import read_cluster
from paceline.plan.fit import load_constants
from paceline.plan.recipe_costs import of_recipe
from paceline.plan.search import search
from paceline.recipe import Rules, parse_recipe

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


def main() -> None:
    """Print the table."""
    fit = load_constants()
    for words in CLUSTERS:
        print(f"\n{words}")
        for name, (layers, hidden, heads) in MODELS.items():
            model = {"kind": "gpt", "layers": layers, "hidden": hidden, "heads": heads}
            data = {"kind": "text", "seq_len": 2048, "tokenizer": "bpe", "vocab_size": 32000}
            train = {"steps": 1, "global_batch_size": 512, "microbatch_size": 1, "dtype": "bf16"}
            recipe = parse_recipe({"model": model, "data": data, "train": train | {"reduction": "fast"}})
            found = search(of_recipe(recipe), Rules.of(recipe), read_cluster(words, fit.links), fit)
            if not found.fitting:
                assert found.smallest is not None
                least = f"{found.smallest.layout}: {found.smallest.demand.high / 1e9:.0f} GB"
                print(f"  {name:<5} nothing fits; {least}")
                continue
            first, *others = found.best_by_family
            more = f"{others[0].family} {others[0].seconds / first.seconds - 1:+.0%}" if others else ""
            print(f"  {name:<5} {first.seconds:>7.2f} s  {first.layout}  ({more})", flush=True)


if __name__ == "__main__":
    main()
