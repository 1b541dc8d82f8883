"""Models with complex parameters and buffers train as in a loop of plain torch, and every number is kept.

The truth is torch's own autograd and AdamW in one process; only the cast to fp64 is written out by hand.
"""

from __future__ import annotations

import functools
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from paceline.checkpoint.export import export_model
from paceline.checkpoint.tensors import read_infos
from paceline.errors import PacelineError
from paceline.train.trainer import Trainer
from paceline.verifying.check import build_default_optimizer, resolve_layout, verify_subject
from paceline.verifying.subject import UserSubject
from paceline.world import World
from tests.checkpoint.states import read_tensor, write_tensors
from tests.dist.pool import Pool, RankError
from tests.verifying.runs import PoolRunner

STEPS, CLIP = 4, 0.5


class Block(nn.Module):
    """A complex layer between real ones, with a gradient that autograd leaves to be conjugated."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.mix = nn.Linear(16, 16, dtype=torch.complex64)
        self.gain = nn.Parameter(torch.randn(16, dtype=torch.complex64))
        self.back = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.mix(self.norm(x).to(self.mix.weight.dtype))
        return x + self.back((self.gain.conj() * mixed).abs())


class Spectral(nn.Module):
    """Rotary angles as a complex buffer, complex weights of 0 to 2 dimensions, one of them unused."""

    def __init__(self) -> None:
        super().__init__()
        angles = torch.outer(torch.arange(8.0), 1 / 100 ** (torch.arange(8) / 8))
        self.register_buffer("freqs_cis", torch.polar(torch.ones(8, 8), angles))
        self.register_buffer("conjugated", torch.randn(16, dtype=torch.complex64).conj())
        self.emb = nn.Embedding(32, 16)
        self.scale = nn.Parameter(torch.tensor(0.5 + 0.25j))
        self.unused = nn.Parameter(torch.randn(3, dtype=torch.complex64))
        self.blocks = nn.ModuleList([Block() for _ in range(2)])
        self.head = nn.Linear(16, 32)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.emb(ids)
        turned = torch.view_as_complex(x.unflatten(-1, (-1, 2))) * self.freqs_cis * self.scale
        x = torch.view_as_real(turned).flatten(-2) + (self.conjugated * x).imag
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class AllComplex(nn.Module):
    """Blocks of complex parameters alone, which dp_shard can cut; complex tensors pass between them."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.head = nn.Embedding(32, 8), nn.Linear(8, 32)
        self.blocks = nn.ModuleList([nn.Linear(8, 8, dtype=torch.complex64) for _ in range(2)])

    def forward(self, ids: Tensor) -> Tensor:
        x = self.emb(ids)
        x = torch.complex(x, x / 2)
        for block in self.blocks:
            x = x.conj() + block(x) / (1 + block(x).abs())
        return self.head(x.abs())


MODELS = {"spectral": Spectral, "all": AllComplex}


def make(step: int) -> dict[str, Tensor]:
    return {"ids": torch.randint(0, 32, (8, 8), generator=torch.Generator().manual_seed(step))}


def run(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(batch["ids"])


def measure(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), batch["ids"].flatten())


def build(kind: str, dtype: str) -> nn.Module:
    """Return the model, in fp64 with every number widened by hand."""
    torch.manual_seed(0)
    model = MODELS[kind]()
    if dtype == "fp64":
        wide = {torch.complex64: torch.complex128, torch.float32: torch.float64}
        for module in model.modules():
            for key, parameter in list(module.named_parameters(recurse=False)):
                setattr(module, key, nn.Parameter(parameter.detach().to(wide[parameter.dtype])))
            for key, buffer in list(module.named_buffers(recurse=False)):
                setattr(module, key, buffer.to(wide[buffer.dtype]))
    return model


@functools.cache
def train_plainly(kind: str, dtype: str) -> tuple[list[float], list[float], dict[str, Tensor]]:
    model = build(kind, dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, norms = [], []
    for step in range(STEPS):
        loss = measure(run(model, make(step)), make(step))
        optimizer.zero_grad()
        loss.backward()
        for p in model.parameters():  # the optimizers of torch refuse the conjugates of autograd
            p.grad = None if p.grad is None else p.grad.resolve_conj()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
        losses.append(loss.item())
    return losses, norms, {name: each.detach().clone() for name, each in model.state_dict().items()}


def train(
    world: World, kind: str, dtype: str, layout: str, folder: str, last: int, **settings: Any
) -> tuple[list[float], list[float], dict[str, Tensor]]:
    warnings.filterwarnings("ignore", message="Redistribute|.*complex32")
    torch.manual_seed(0)
    trainer = Trainer(
        MODELS[kind](),
        forward=run,
        loss=measure,
        optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=1e-2),
        dtype=dtype,
        layout=layout,
        microbatch_size=2,
        clip_norm=CLIP,
        example=make(0),
        **settings,
    )
    data = [{"ids": row} for step in range(STEPS) for row in make(step)["ids"]]
    loader = trainer.loader(data, global_batch_size=8, shuffle=False)
    trainer.resume(folder)
    losses, norms = [], []
    for batch in loader:
        step = trainer.step(batch)
        losses.append(step.loss)
        norms.append(step.grad_norm)
        if step.number == last:
            break
    trainer.save(wait=True)
    plain = build(kind, dtype)
    trainer.gather_into(plain)
    return losses, norms, dict(plain.state_dict())


def expect_plain(
    kind: str, dtype: str, found: tuple[list[float], list[float], dict[str, Tensor]], first: int, last: int
) -> None:
    losses, norms, tensors = train_plainly(kind, dtype)
    tolerance = 1e-10 if dtype == "fp64" else 1e-3
    assert found[0] == pytest.approx(losses[first:last], rel=tolerance)
    assert found[1] == pytest.approx(norms[first:last], rel=tolerance)
    if last == STEPS:
        assert found[2].keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert found[2][name].dtype == tensor.dtype, name
            torch.testing.assert_close(found[2][name], tensor, rtol=tolerance, atol=tolerance, msg=name)


@pytest.mark.parametrize(
    ("kind", "dtype", "before", "after", "settings"),
    [
        ("spectral", "fp64", "dp_replicate=2", "tp=2", {}),
        ("spectral", "fp64", "tp=2", "pp=2", {"checkpoint_mode": "sharded"}),
        ("spectral", "fp64", "pp=2", "cp=2", {"asynchronous_saves": True}),
        ("spectral", "fp32", "dp_replicate=2", "dp_replicate=1", {"reduction": "exact"}),
        ("all", "fp64", "dp_shard=2", "dp_replicate=2", {"checkpoint_mode": "sharded"}),
        ("all", "fp32", "dp_replicate=2", "dp_shard=2", {"reduction": "exact"}),
        ("all", "fp64", "pp=2", "dp_replicate=1", {"reduction": "exact"}),
    ],
)
def test_a_complex_model_trains_and_resumes_as_in_plain_torch(
    ranks: Pool, tmp_path: Path, kind: str, dtype: str, before: str, after: str, settings: dict[str, Any]
) -> None:
    for layout, first, last in ((before, 0, 2), (after, 2, STEPS)):
        nproc = resolve_layout(layout).num_ranks
        call = functools.partial(train, **settings)
        for found in ranks.run(call, nproc, (kind, dtype, layout, str(tmp_path), last))[:1]:
            expect_plain(kind, dtype, found, first, last)


def test_the_exact_reduction_gives_complex_weights_the_same_bits_on_any_ranks(
    ranks: Pool, tmp_path: Path
) -> None:
    call = functools.partial(train, reduction="exact")
    found = []
    for layout, nproc in (("dp_replicate=1", 1), ("dp_replicate=2", 2), ("dp_shard=2", 2)):
        args = ("all", "fp32", layout, str(tmp_path / layout), STEPS)
        found.append(ranks.run(call, nproc, args)[0])
    for other in found[1:]:
        assert other[:2] == found[0][:2]
        assert all(torch.equal(other[2][name], tensor) for name, tensor in found[0][2].items())


def test_real_and_complex_parameters_in_one_block_are_refused_under_dp_shard(
    ranks: Pool, tmp_path: Path
) -> None:
    with pytest.raises(RankError) as caught:
        ranks.run(train, 2, ("spectral", "fp32", "dp_shard=2", str(tmp_path), 1))
    [error, *_] = caught.value.causes.values()
    assert isinstance(error, PacelineError)
    assert error.code == "PL442"
    assert "view_as_complex" in str(error)


@pytest.mark.parametrize("kind", MODELS)
def test_verify_keeps_complex_numbers_complex(ranks: Pool, kind: str) -> None:
    subject = UserSubject(
        model_fn=MODELS[kind],
        batch_fn=make,
        loss=measure,
        forward=run,
        optimizer=build_default_optimizer,
        num_steps=2,
        dtype="fp64",
        reduction="fast",
        clip_norm=CLIP,
        microbatch_size=2,
        global_batch_size=None,
        seed=0,
        device="cpu",
        settings={},
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # "Casting complex values to real discards the imaginary part"
        layouts = [resolve_layout(each) for each in ("dp_replicate=2", "tp=2")]
        verified = verify_subject(subject, layouts, run=PoolRunner(ranks))
    assert verified.ok, list(map(str, verified.findings))
    assert not verified.remarks
    name = {"spectral": "freqs_cis", "all": "blocks.0.weight"}[kind]
    scale = verified.tolerances[f"2/{'buffer' if kind == 'spectral' else 'weight'}/{name}"][1]
    assert math.isclose(scale, 1.0) if kind == "spectral" else scale > 0


def test_files_keep_complex_numbers_of_both_widths(tmp_path: Path) -> None:
    for length in range(1, 18):  # of a name, so that the numbers begin at every place that a header leaves
        tensors = {
            "w" * length: torch.randn(3, 5, dtype=torch.complex128).t(),
            "number": torch.randn((), dtype=torch.complex128),
            "narrow": torch.randn(7, dtype=torch.complex64).conj(),
            "empty": torch.randn(0, 3, dtype=torch.complex128),
            "real": torch.randn(3),
        }
        path = tmp_path / str(length)
        write_tensors(path, tensors)
        assert {name: info.shape for name, info in read_infos(path).items()} == {
            name: tuple(tensor.shape) for name, tensor in tensors.items()
        }
        for name, tensor in tensors.items():
            found = read_tensor(path, name)
            assert found.dtype == tensor.dtype
            assert torch.equal(found, tensor)


def test_an_export_in_fp32_has_the_complex_type_of_that_width(ranks: Pool, tmp_path: Path) -> None:
    args = ("spectral", "fp64", "dp_replicate=1", str(tmp_path), 2)
    [(_, _, tensors)] = ranks.run(train, 1, args)
    [checkpoint] = (tmp_path / "checkpoints").glob("step-*")
    export_model(checkpoint, tmp_path / "out.safetensors", torch.float32)
    exported = load_file(tmp_path / "out.safetensors")
    for name, tensor in tensors.items():
        narrow = torch.complex64 if tensor.is_complex() else torch.float32
        assert torch.equal(exported[name], tensor.to(narrow)), name
