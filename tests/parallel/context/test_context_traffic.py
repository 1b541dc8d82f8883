"""Bytes and messages of cp, counted at torch's API; activations, counted from what backward keeps; leaks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.mesh import build_mesh
from paceline.models.gpt import Gpt
from paceline.parallel.context.apply import apply_context
from paceline.parallel.context.find import find_context_plan
from paceline.recipe import Layout
from paceline.recipe.schema import GptModel
from tests.dist.pool import Pool
from tests.parallel.context.test_context_refusals import Attend, Model, _plain

SAMPLES, LENGTH, LAYERS, HIDDEN, HEADS, KV_HEADS = 4, 24, 3, 32, 4, 2


def _gpt(world: Any) -> tuple[Gpt, Tensor]:
    torch.manual_seed(0)
    section = GptModel(kind="gpt", layers=LAYERS, hidden=HIDDEN, heads=HEADS, kv_heads=KV_HEADS)
    model = Gpt(section, 50, LENGTH)
    ids = torch.randint(0, 50, (SAMPLES, LENGTH))
    if world.world_size > 1:
        axis = build_mesh(Layout.parse(f"cp={world.world_size}"), world).cp
        plan = find_context_plan(model, lambda m: m(ids[:2]), world.world_size)
        apply_context(model, plan, axis)
    return model, ids


def count(world: Any) -> dict[str, tuple[int, int]]:
    """Count messages and bytes that this rank sends to others in forward and in backward, by collective."""
    model, ids = _gpt(world)
    sent: dict[str, list[int]] = {}
    phase, n, rank = "forward", world.world_size, world.rank
    exchange, gather = dist.all_to_all_single, dist.all_gather

    def all_to_all_single(into: Tensor, flat: Tensor, received: Any, given: list[int], **kw: Any) -> Any:
        others = sum(given) - given[rank]
        sent.setdefault(f"{phase} exchange", []).append(others * flat.element_size())
        return exchange(into, flat, received, given, **kw)

    def all_gather(parts: list[Tensor], own: Tensor, **kw: Any) -> Any:
        sent.setdefault(f"{phase} gather", []).append((n - 1) * own.numel() * own.element_size())
        return gather(parts, own, **kw)

    dist.all_to_all_single, dist.all_gather = all_to_all_single, all_gather  # type: ignore[assignment]
    try:
        loss = model(ids).sum()
        phase = "backward"
        loss.backward()
    finally:
        dist.all_to_all_single, dist.all_gather = exchange, gather
    return {key: (len(sizes), sum(sizes)) for key, sizes in sent.items()}


def test_bytes_are_those_of_the_formula(ranks: Pool) -> None:
    activation = 4 * SAMPLES * LENGTH * HIDDEN
    keys = activation * KV_HEADS // HEADS
    n = 2
    per_pass = LAYERS * (n - 1) * (2 * activation + 2 * keys) // n // n
    for sent in ranks.run(count, nproc=n):
        # Queries, keys, values, and back: a message each, because each projection returns by itself.
        assert sent["forward exchange"] == (4 * LAYERS, per_pass)
        assert sent["backward exchange"] == (4 * LAYERS, per_pass)
        # The last block's output in forward, the first one's gradient in backward.
        assert sent["forward gather"] == sent["backward gather"] == (1, (n - 1) * activation // n)


def count_kept(model: nn.Module, ids: Tensor, block: nn.Module) -> int:
    """Return the bytes that backward keeps of a block's forward, without parameters and buffers."""
    known = {p.untyped_storage().data_ptr() for p in [*model.parameters(), *model.buffers()]}
    kept: dict[int, int] = {}
    alive: list[Tensor] = []
    inside = False

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if inside and storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)
        return tensor

    def enter(*_: Any) -> None:
        nonlocal inside
        inside = True

    def leave(*_: Any) -> None:
        nonlocal inside
        inside = False

    block.register_forward_pre_hook(enter)
    block.register_forward_hook(leave)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(ids).sum()
    assert loss.requires_grad
    return sum(kept.values())


def keep(world: Any) -> int:
    """Return bytes that backward keeps of the blocks, without parameters."""
    model, ids = _gpt(world)
    return count_kept(model, ids, model.layers[1])


def test_activations_of_a_block_are_divided(ranks: Pool) -> None:
    (whole,) = ranks.run(keep, nproc=1)
    for part in ranks.run(keep, nproc=2):
        assert abs(part / whole - 1 / 2) < 0.05, (part, whole)


class Packed(Attend):
    """Attention within documents, which are packed into one sequence."""

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (y.view(batch, length, 4, 8).transpose(1, 2) for y in self.qkv(x).split(32, dim=-1))
        document = torch.arange(length) // 7  # 24 positions: 7, 7, 7 and 3
        mask = (document[:, None] == document[None, :]).tril()
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        result: Tensor = self.out(y.transpose(1, 2).reshape(batch, length, 32))
        return result


def read_documents(world: Any) -> tuple[Tensor, Tensor]:
    """Return the outputs before and after a token of the second document, position 9, is changed."""
    torch.manual_seed(0)
    model = Model(_plain)
    for block in model.blocks:
        block.attend = Packed()
    ids = torch.randint(0, 50, (2, LENGTH))
    if world.world_size > 1:
        axis = build_mesh(Layout.parse(f"cp={world.world_size}"), world).cp
        apply_context(model, find_context_plan(model, lambda m: m(ids), world.world_size), axis)
    before = model(ids).detach()
    ids[:, 9] = (ids[:, 9] + 1) % 50
    return before, model(ids).detach()


def test_documents_do_not_see_each_other(ranks: Pool) -> None:
    ((expected, changed),) = ranks.run(read_documents, nproc=1)
    for before, after in ranks.run(read_documents, nproc=2):
        assert torch.equal(before, expected)
        assert torch.equal(after, changed)
        same = (before == after).all(-1).all(0)
        assert same.tolist() == [not 9 <= position < 14 for position in range(LENGTH)]
