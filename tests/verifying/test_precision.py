"""The noise is that of the type that a model computes in, and no fault hides behind it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.launching.ending.endings import RankFailed
from paceline.verifying.check import Verified, resolve_layout, verify_subject
from tests.dist.pool import Pool
from tests.verifying.runs import PoolRunner
from tests.verifying.test_verify import subject


def is_layout() -> bool:
    return dist.is_initialized() and dist.get_world_size() > 1


class Sums(nn.Module):
    """Adds up its input in `dtype`; layouts in two parts, which rounds otherwise."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        terms = x.to(self.dtype) * 0.7
        if is_layout():
            total = terms[..., ::2].sum(-1, keepdim=True) + terms[..., 1::2].sum(-1, keepdim=True)
        else:
            total = terms.sum(-1, keepdim=True)
        return x + total.to(x.dtype)


class Model(nn.Module):
    """A sum in fp32 between two layers, and a fault of one layout after one of the three."""

    faulty = ""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.sums, self.last = nn.Linear(96, 32), Sums(torch.float32), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        for name, module in self.named_children():
            x = module(x)
            if name == self.faulty and is_layout():
                x = x * (1 + 1e-9)
        return x


class FaultyFirst(Model):
    faulty = "first"


class FaultyLast(Model):
    faulty = "last"


class Wide(Model):
    """Computes in the training's type throughout."""

    def __init__(self) -> None:
        super().__init__()
        self.sums = Sums(torch.float64)


class FaultyWide(Wide):
    faulty = "last"


def verify(ranks: Pool, model: Any, layout: str = "dp_replicate=2", **settings: Any) -> Verified:
    given = subject(model, **settings)
    return verify_subject(given, [resolve_layout(layout)], run=PoolRunner(ranks), may_narrow=True)


def test_rounding_in_a_narrower_type_inside_is_no_fault(ranks: Pool) -> None:
    verified = verify(ranks, Model)
    assert verified.ok, list(map(str, verified.findings))
    (remark,) = verified.remarks
    assert remark.code == "PL724"
    assert "rounding in fp32" in remark.saw
    assert "sums" in remark.saw
    assert not verified.results[0].same_bits


@pytest.mark.parametrize("model", [FaultyFirst, FaultyLast])
def test_a_fault_outside_of_the_narrower_part_is_found(ranks: Pool, model: type[Model]) -> None:
    """Far below rounding in fp32."""
    verified = verify(ranks, model)
    if model is FaultyFirst:
        assert [finding.code for finding in verified.findings] == ["PL701"]
    else:  # behind the part, where its rounding is the first difference
        assert verified.ok


def test_a_small_fault_is_found_in_a_model_without_casts(ranks: Pool) -> None:
    assert verify(ranks, Wide).ok
    (finding,) = verify(ranks, FaultyWide).findings
    assert finding.code == "PL701"


class RunningMean(nn.Module):
    """Keeps a running mean for evaluation, which ranks never share."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(96))
        self.layer = nn.Linear(96, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(x.mean(0), 0.1)
        output: Tensor = self.layer(x)
        return output


@pytest.mark.parametrize("layout", ["dp_replicate=2", "dp_shard=2"])
def test_a_float_buffer_that_ranks_never_share_is_found(ranks: Pool, layout: str) -> None:
    (finding,) = verify(ranks, RunningMean, layout).findings
    assert finding.code == "PL710"
    assert finding.where.endswith(", mean")
    assert "depends on the order of the microbatches" in finding.saw


class OnlyFp32(nn.Module):
    """Has an operation without a kernel for fp64."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(96, 4)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layer(x.flatten(1))
        if output.dtype == torch.float64:
            raise RuntimeError("Expected mat_a to be Float32, BFloat16 or Float16 matrix, got Double")
        return output


def test_a_model_that_has_no_fp64_is_verified_in_fp32(ranks: Pool) -> None:
    verified = verify(ranks, OnlyFp32)
    assert verified.ok
    assert verified.dtype == "fp32"
    (remark,) = verified.remarks
    assert remark.code == "PL724"
    assert "Expected mat_a to be Float32" in remark.saw
    layouts = [resolve_layout("dp_replicate=2")]
    with pytest.raises(RankFailed, match="Expected mat_a"):
        verify_subject(subject(OnlyFp32), layouts, run=PoolRunner(ranks))


class OtherEps(nn.Module):
    """A norm with another eps on rank 1."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(96), nn.Linear(96, 4)
        if is_layout() and dist.get_rank() == 1:
            self.norm.eps = 1e-3

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layer(self.norm(x.flatten(1)))
        return output


def test_a_setting_of_one_rank_is_named(ranks: Pool) -> None:
    (finding,) = verify(ranks, OtherEps).findings
    assert finding.code == "PL719"
    assert finding.where.endswith("step 1, norm")
    assert "eps is 0.001 on rank 1 only, and 1e-05 in one process" in finding.saw
