"""An example for the help of each command."""

from __future__ import annotations

import argparse

# By the words after `paceline`.
EXAMPLES = {
    "run": "run --nproc-per-node 2 train.py --lr 3e-4",
    "train": "train recipes/gpt-stdlib.toml --nproc 2",
    "verify": 'verify recipes/gpt-stdlib.toml --layout "dp_shard=2"',
    "checkpoint": "checkpoint show runs/gpt-stdlib",
    "compare": "compare runs/before runs/after",
    "import": "import ds_config.json -o recipe.toml",
    "checkpoint show": "checkpoint show runs/gpt-stdlib --tensors",
    "checkpoint verify": "checkpoint verify runs/gpt-stdlib",
    "checkpoint hash": "checkpoint hash runs/gpt-stdlib",
    "checkpoint export": "checkpoint export runs/gpt-stdlib model.safetensors",
    "bench": "bench scaling recipes/gpt-stdlib.toml --nproc 2",
    "bench scaling": "bench scaling recipes/gpt-stdlib.toml --nproc 2",
    "bench overhead": "bench overhead recipes/gpt-stdlib.toml --nproc 2",
    "bench buckets": "bench buckets recipes/gpt-stdlib.toml --nproc 2",
    "bench dp": "bench dp train.py --nproc 2",
    "bench collectives": "bench collectives --nproc 4",
    "plan": 'plan recipes/gpt-stdlib.toml --cluster "8 nodes of 8 H100-80"',
    "plan layouts": 'plan recipes/gpt-stdlib.toml --cluster "8 nodes of 8 H100-80"',
    "plan links": "plan links recipes/gpt-islands.toml --link 100mbit,50ms --step 0.3",
    "probe": "probe --nproc 4",
    "plan schedule": "plan schedule 1f1b --ranks 4",
    "completion": "completion bash",
    "profile": "profile --nproc-per-node 2 train.py",
    "profile read": "profile read profile-1",
    "profile script": "profile --nproc-per-node 2 train.py",
    "lint": "lint train.py",
    "launch": "launch slurm --nodes 2 --time 24:00:00 train.py",
    "launch slurm": "launch slurm --nodes 2 --gpus-per-node 8 --time 24:00:00 --submit train.py",
    "launch kubernetes": "launch kubernetes --nodes 2 --image registry/image:tag train.py",
    "launch ssh": "launch ssh --hosts node0,node1 --nproc-per-node 8 --submit train.py",
    "doctor": "doctor --nnodes 4 --rdzv-endpoint node0",
    "recipes": "recipes gpt-stdlib",
    "explain": "explain PL530",
}


def add_examples(parser: argparse.ArgumentParser, words: str = "") -> None:
    """End the help of a command, and of the commands below it, with its example."""
    if words in EXAMPLES:
        example = f"example: paceline {EXAMPLES[words]}"
        parser.epilog = f"{parser.epilog} {example}" if parser.epilog else example
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, command in action.choices.items():
                add_examples(command, f"{words} {name}".strip())
