"""Bytes per rank at named instants, from the storages of all tensors alive, against the formulas.

For N bytes of parameters, of which B in each block and R around them, on n ranks of dp_shard:

| instant | zero = 3 | zero = 2 | zero = 1 |
|---|---|---|---|
| built | N/n | N/n | N/n |
| in the last block's forward | N/n + R + B | N/n + N | N/n + N |
| between two microbatches | N/n + N/n | N/n + N + N/n | N/n + N + N |
| after the last backward | 2 N/n | 2 N/n | 2 N/n |
| after AdamW's step | 4 N/n | 4 N/n | 4 N/n |

In a block's forward with zero = 3 each block that is gathered ahead adds a B. With replicas there is one more
N/n between two microbatches: the chunk that waits for the sum over replicas.
"""

from __future__ import annotations

import gc
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor

from paceline.data.share import list_numbers
from paceline.models.gpt import Gpt
from paceline.recipe.schema import GptModel
from tests.dist.pool import Pool
from tests.parallel.sharded import LENGTH, build_shards, microbatch, sum_losses

LAYERS = 6


def build_gpt() -> nn.Module:
    torch.manual_seed(0)
    section = GptModel(kind="gpt", layers=LAYERS, hidden=128, heads=4, tie_embeddings=False)
    return Gpt(section, 64, LENGTH)


def num_bytes(tensors: Any) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def live_bytes() -> int:
    """Return the bytes of all live tensors but activations; for a DTensor, of its local tensor."""
    time.sleep(0.05)  # gloo's threads let go of a collective's tensors a moment after it is done
    gc.collect()
    storages = {}
    tensors = [value for value in gc.get_objects() if issubclass(type(value), Tensor)]
    leaves = [t for t in tensors if t.grad_fn is None]
    gradients = [t.grad for t in leaves if t.grad is not None]
    for tensor in leaves + gradients:
        # An earlier test may have left tensors that hold nothing.
        if not isinstance(tensor, DTensor | FakeTensor) and not tensor.is_meta:
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def measure(world: Any, layout: str) -> dict[str, int]:
    seen: dict[str, int] = {}
    before = live_bytes()

    def see(instant: str) -> None:
        seen[instant] = live_bytes() - before

    model = build_gpt()
    shards, mesh = build_shards(world, layout, model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    see("built")
    places = {"ahead": model.layers[LAYERS // 2], "forward": model.layers[-1]}
    handles = [
        next(block.children()).register_forward_hook(lambda *_, instant=instant: see(instant))
        for instant, block in places.items()
    ]
    shards.begin((2,) * mesh.dp.size)
    for number in range(2):
        with shards.synchronising(number == 1, 2 * mesh.dp.rank + number):
            shards.backward(sum_losses(model, microbatch(number))[0])
        see("last backward" if number else "between")
        for handle in handles:
            handle.remove()
    optimizer.step()
    see("step")
    return seen


def expected(zero: int, n: int, replicas: int) -> dict[str, float]:
    model = build_gpt()
    whole = num_bytes(model.parameters())
    block = num_bytes(model.layers[0].parameters())
    rest = whole - LAYERS * block
    shard = whole / n
    waiting = shard if replicas > 1 and zero > 1 else 0
    return {
        "built": shard,
        "ahead": shard + rest + (2 if zero == 3 else LAYERS // 2 + 2) * block,
        "forward": shard + (rest + block if zero == 3 else whole),
        "between": waiting + {3: 2 * shard, 2: 2 * shard + whole, 1: shard + 2 * whole}[zero],
        "last backward": 2 * shard,
        "step": 4 * shard,
    }


def measure_exact(world: Any, turns: int) -> list[int]:
    """Return the bytes alive after each of eight microbatches, summed exactly, and before."""
    model = build_gpt()
    shards, mesh = build_shards(world, "dp_shard=2", model, exact=True)
    seen = [live_bytes()]
    shards.begin((8, 8), turns)
    for number, index in enumerate(list_numbers((8, 8), turns, mesh.dp.rank)):
        with shards.synchronising(number == 7, index):
            shards.backward(sum_losses(model, microbatch(number))[0])
        seen.append(live_bytes())
    return seen


def test_an_exact_sum_keeps_shards_only(ranks: Pool) -> None:
    """One per microbatch that is 1 in the binary number of those taken, and fully_shard's own gradient."""
    shard = num_bytes(build_gpt().parameters()) / 2
    before, *seen = ranks.run(measure_exact, 2, (2,), timeout_s=60)[0]
    kept = [number.bit_count() for number in range(1, 8)]
    assert [each - before for each in seen[:7]] == pytest.approx([(1 + k) * shard for k in kept], rel=0.05)
    assert seen[7] - before == pytest.approx(shard, rel=0.05)


@pytest.mark.parametrize(
    ("layout", "zero", "n", "replicas"),
    [
        ("dp_shard=2 zero=1", 1, 2, 1),
        ("dp_shard=2 zero=2", 2, 2, 1),
        ("dp_shard=2 zero=3", 3, 2, 1),
        ("dp_shard=4 zero=1", 1, 4, 1),
        ("dp_shard=4 zero=2", 2, 4, 1),
        ("dp_shard=4 zero=3", 3, 4, 1),
        ("dp_shard=8 zero=3", 3, 8, 1),
        ("dp_replicate=2 dp_shard=2 zero=1", 1, 2, 2),
        ("dp_replicate=2 dp_shard=2 zero=3", 3, 2, 2),
    ],
)
def test_bytes_follow_the_formulas(ranks: Pool, layout: str, zero: int, n: int, replicas: int) -> None:
    wanted = expected(zero, n, replicas)
    for seen in ranks.run(measure, n * replicas, (layout,), timeout_s=60):
        assert seen == pytest.approx(wanted, rel=0.05)
