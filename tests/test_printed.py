"""What a user holds prints what a person wants to know, in a few lines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import paceline
from paceline.finding import Finding
from paceline.verifying.check import LayoutResult, Verified


def test_objects_of_a_loop_print_a_line(tmp_path: Path) -> None:
    with paceline.start() as world:
        trainer = paceline.Trainer(
            torch.nn.Linear(64, 1),
            loss=lambda output, batch: (output.square().sum(), len(batch)),
            optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.1),
        )
        loader = trainer.loader(torch.randn(64, 64), global_batch_size=32, epochs=1, name="rows")
        trainer.resume(tmp_path)
        held: list[Any] = [world, loader]
        for share in loader:
            held += [share, trainer.step(share), trainer.save(wait=True) and trainer.save()]
        held.append(trainer.evaluate(trainer.loader(torch.randn(8, 64), global_batch_size=8)))
    printed = [repr(each) for each in held]
    assert all("\n" not in text and len(text) < 250 for text in printed), printed
    assert printed[0].startswith("World(rank 0 of 1, node 0 of 1, cpu")
    assert repr(trainer) == "Trainer(dp_replicate=1, after step 2)"
    assert printed[-1] == str(held[-1])
    assert printed[1].startswith("Loader(rows: 64 samples in batches of 32, microbatches of 4; epoch")
    assert printed[2] == "Share(8 of 8 microbatches of batch 0 in epoch 0, 32 samples)"
    assert printed[3].startswith("step 1: loss ")
    assert str(tmp_path) in printed[4]


def test_a_step_of_a_loop_prints_its_means() -> None:
    with paceline.start():
        model = torch.nn.Linear(64, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loop = paceline.Loop(model, optimizer, microbatch_size=4, means=["size"])
        step = loop.own(torch.ones(8, 64))
        assert repr(step) == "step 1, before the end of its inner loop"
        for batch in step:
            step.backward(model(batch).square().mean())
            step.mean("size", 0.5)
        assert repr(step) == f"step 1: loss {step.loss:.6g}, gradient norm {step.grad_norm:.6g}, size 0.5"


def test_a_comparison_prints_a_line_per_layout() -> None:
    finding = Finding("PL714", "net.0", "differs.", "It must not.", "Look.")
    results = [
        LayoutResult("dp_shard=2", 2, "ok", worst=0.25, num_compared=9),
        LayoutResult("tp=2", 2, "differs", worst=7.0, num_compared=9, findings=[finding]),
    ]
    tolerances = {f"1/gradient/{number}": (1e-9, 1.0, 1e-7) for number in range(1000)}
    verified = Verified(results, "fp64", "fast", 3, 1.0, 9, [8], 4.0, tolerances, 1.0, [])
    assert repr(verified).splitlines() == [
        "3 steps in fp64, 9 tensors compared with one process",
        "dp_shard=2 on 2 ranks: ok, largest difference 0.25 of its tolerance",
        "tp=2 on 2 ranks: differs, largest difference 7 of its tolerance",
        "  net.0: differs. It must not. Look. [PL714]",
    ]
    table = verified._repr_html_()
    assert "<tr><td>tp=2</td><td>2</td><td>differs</td><td>7</td></tr>" in table
    assert "<pre>net.0: differs. It must not. Look. [PL714]</pre>" in table
