"""Recompute by itself, in one process and outside of a trainer."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from paceline.models.resnet import Resnet
from paceline.parallel.blocks import find_blocks
from paceline.parallel.recompute import apply_recompute
from paceline.recipe.schema import ResnetModel
from paceline.torch_seams.attention_ops import ATTENTION_OPS


def build_pair(kind: str) -> tuple[nn.Module, nn.Module, Tensor]:
    torch.manual_seed(0)
    plain = Resnet(ResnetModel(kind="resnet", blocks=[2, 1], width=4), 1, 10).double()
    recomputed = copy.deepcopy(plain)
    apply_recompute(recomputed, find_blocks(recomputed), kind)
    return plain, recomputed, torch.randn(5, 1, 8, 8, dtype=torch.float64)


@pytest.mark.parametrize("kind", ["block", "selective"])
def test_running_statistics_move_once(kind: str) -> None:
    plain, recomputed, images = build_pair(kind)
    for _ in range(2):
        for model in (plain, recomputed):
            model(images).square().sum().backward()
    for (name, one), (_, other) in zip(
        plain.state_dict().items(), recomputed.state_dict().items(), strict=True
    ):
        assert torch.equal(one, other), name
    for (name, one), (_, other) in zip(plain.named_parameters(), recomputed.named_parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-12, atol=1e-12, msg=name)
    assert int(recomputed.blocks[0].norm1.num_batches_tracked) == 2  # type: ignore


@pytest.mark.parametrize("kind", ["block", "selective"])
def test_names_and_evaluation_stay(kind: str) -> None:
    plain, recomputed, images = build_pair(kind)
    assert list(plain.state_dict()) == list(recomputed.state_dict())
    for model in (plain, recomputed):
        model.eval()
    with torch.no_grad():
        assert torch.equal(plain(images), recomputed(images))


def count_convolutions(model: nn.Module, images: Tensor) -> int:
    """Return how many run in backward's second forwards."""
    output = model(images).sum()
    count = 0
    handles = []

    def note(*_: object) -> None:
        nonlocal count
        count += 1

    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            handles.append(module.register_forward_hook(note))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
        output.backward()
    for handle in handles:
        handle.remove()
    assert count == 6  # the modules of the blocks are run again ...
    return sum(event.count for event in profile.key_averages() if event.key == "aten::_convolution")


def test_selective_keeps_convolutions() -> None:
    _, block, images = build_pair("block")
    _, selective, _ = build_pair("selective")
    assert count_convolutions(block, images) == 6
    assert count_convolutions(selective, images) == 0  # ... and their results come from the first run


def test_all_kernels_of_attention_are_known() -> None:
    """Whichever of them torch takes, the selective form keeps its result, and tp has a rule for it."""
    names = {name.removeprefix("aten::").partition(".")[0] for name in torch._C._dispatch_get_all_op_names()}
    found = {n for n in names if n.startswith("_scaled_dot_product") and not n.endswith("_backward")}
    assert found <= set(ATTENTION_OPS)
