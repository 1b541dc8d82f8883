"""A loop of a user's own against plain torch: one big batch, a GAN, and the way to the user's forward."""

from __future__ import annotations

import copy
import signal
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import paceline
from paceline.world import World
from tests.dist.pool import Pool


def test_token_means_are_those_of_one_big_batch() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 9)).double()
    ids, labels = torch.randint(9, (23, 7)), torch.randint(9, (23, 7))
    labels[torch.rand(23, 7) < 0.6] = -100
    model = copy.deepcopy(plain)
    with paceline.start():
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loop = paceline.Loop(
            model, optimizer, dtype="fp64", microbatch_size=4, weight=lambda batch: (batch[1] != -100).sum()
        )
        for explicit in (False, True):
            optimizer.zero_grad()
            step = loop.split((ids, labels))
            for x, y in step:
                loss = cross_entropy(model(x).transpose(1, 2), y)
                if explicit:
                    step.backward(loss)
                else:
                    loss.backward()
            plain.zero_grad()
            expected = cross_entropy(plain(ids).transpose(1, 2), labels)
            expected.backward()
            for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-12, atol=1e-15)
        assert step.loss == pytest.approx(float(expected.detach()), rel=1e-12)


def play(d: nn.Module, g: nn.Module, real: Tensor, fake: Tensor) -> tuple[Tensor, Tensor]:
    return d(fake.detach()).mean() - d(real).mean() + d(real).square().mean(), -d(fake).mean()


def test_a_gan_trains_as_in_plain_torch() -> None:
    torch.manual_seed(1)
    g, d = nn.Linear(3, 6).double(), nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    real, noise = torch.randn(12, 6).double(), torch.randn(12, 3).double()
    ours, theirs = copy.deepcopy((g, d)), (g, d)
    of_g, of_d = (torch.optim.Adam(each.parameters(), lr=0.05) for each in theirs)
    for _ in range(5):
        of_d.zero_grad()
        play(d, g, real, g(noise))[0].backward()
        of_d.step()
        of_g.zero_grad()
        play(d, g, real, g(noise))[1].backward()
        of_g.step()
    g, d = ours
    of_g, of_d = (torch.optim.Adam(each.parameters(), lr=0.05) for each in ours)
    with paceline.start():
        loop = paceline.Loop({"G": g, "D": d}, [of_g, of_d], microbatch_size=4, dtype="fp64")
        for _ in range(5):
            step = loop.split((real, noise))
            for x, z in step.of("D"):
                play(d, g, x, g(z))[0].backward()
            of_d.step()
            of_d.zero_grad()
            for x, z in step.of("G"):
                play(d, g, x, g(z))[1].backward()
            of_g.step()
            of_g.zero_grad()
            assert all(p.grad is None for p in d.parameters())
    for mine, other in zip(ours, theirs, strict=True):
        for name, value in mine.state_dict().items():
            torch.testing.assert_close(value, other.state_dict()[name], rtol=1e-10, atol=1e-12)


def judge(actor: nn.Module, batch: Any) -> Tensor:
    """Return PPO's loss: clipped ratios to the old policy, the value's error and the entropy."""
    seen, action, old, advantage, reward = batch
    *logits, value = actor(seen).unbind(1)
    policy = torch.distributions.Categorical(logits=torch.stack(logits, 1))
    ratio = (policy.log_prob(action) - old).exp()
    gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    return (0.5 * (value - reward).square() - gain - 0.01 * policy.entropy()).mean()


def test_ppo_trains_as_in_plain_torch() -> None:
    torch.manual_seed(2)
    plain = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 4)).double()
    actor = copy.deepcopy(plain)
    theirs, ours = (torch.optim.Adam(each.parameters(), lr=0.02) for each in (plain, actor))
    with paceline.start():
        loop = paceline.Loop(actor, ours, microbatch_size=3, dtype="fp64")
        for _ in range(3):
            rollout = [torch.randn(20, 5), torch.randint(3, (20,)), *torch.randn(3, 20)]
            rollout = [each.double() if each.is_floating_point() else each for each in rollout]
            for _ in range(4):
                for rows in torch.randperm(20).split(8):
                    batch = [each[rows] for each in rollout]
                    theirs.zero_grad()
                    judge(plain, batch).backward()
                    expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
                    theirs.step()
                    step = loop.split(batch)
                    for part in step:
                        judge(actor, part).backward()
                    assert step.clip_grad_norm_(0.5) == pytest.approx(float(expected), rel=1e-10)
                    ours.step()
                    ours.zero_grad()
    for mine, other in zip(actor.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-12)


class Counts(nn.Module):
    """Two layers, and how many frames of the package lead to its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 2)
        self.found: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        names = [frame.filename for frame in traceback.extract_stack()]
        self.found.append(sum("/src/paceline/" in name for name in names))
        output: Tensor = self.last(self.first(x).relu())
        return output


def count_frames(world: Any, layout: str) -> int:
    trainer = paceline.Trainer(
        Counts(),
        forward=lambda model, batch: model(batch[0]),
        loss=lambda output, batch: (output.square().sum(), len(output)),
        optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.1),
        microbatch_size=2,
        layout=layout,
        example=(torch.ones(2, 6),),
    )
    around = sum("/src/paceline/" in frame.filename for frame in traceback.extract_stack())
    for batch in trainer.loader(TensorDataset(torch.randn(8, 6)), global_batch_size=8, epochs=2):
        trainer.model.found.clear()
        trainer.step(batch)
    return max(trainer.model.found) - around


@pytest.mark.parametrize(
    ("layout", "most"), [("", 5), ("dp_replicate=2", 5), ("dp_shard=2", 7), ("tp=2", 7), ("pp=2", 9)]
)
def test_a_step_reaches_the_users_forward_in_few_calls(ranks: Pool, layout: str, most: int) -> None:
    assert max(ranks.run(count_frames, 2 if layout else 1, (layout,))) <= most


def test_a_signal_in_a_microbatch_ends_the_loop_after_the_step(tmp_path: Path) -> None:
    model = nn.Linear(6, 2)
    before, signalled = torch.zeros(()), False
    rows = TensorDataset(torch.randn(32, 6))
    with paceline.start():
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loop = paceline.Loop(model, optimizer, microbatch_size=2)
        loader: Any = loop.loader(rows, global_batch_size=8, epochs=1)
        loop.resume(tmp_path)
        with pytest.raises(paceline.Stopped) as stopped:  # noqa: PT012
            for step in loader:
                for (x,) in step:
                    if step.number == 2:
                        if not signalled:
                            signal.raise_signal(signal.SIGTERM)
                        signalled = True
                    model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                before = model.weight.detach().clone()
        assert stopped.value.step == 3  # ranks agree on it in the step after the signal
    torch.manual_seed(9)
    again = nn.Linear(6, 2)
    with paceline.start():
        loop = paceline.Loop(again, torch.optim.SGD(again.parameters(), lr=0.1), microbatch_size=2)
        loader = loop.loader(rows, global_batch_size=8, epochs=1)
        assert loop.resume(tmp_path) == 3
        assert torch.equal(again.weight, before)


def test_exact_sums_use_deterministic_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    monkeypatch.setattr(World, "switch_on_determinism", lambda self: called.append("on"))
    for reduction in ("exact", "fast"):
        model = nn.Linear(6, 2)
        with paceline.start():
            paceline.Loop(model, torch.optim.SGD(model.parameters(), lr=0.1), reduction=reduction)
    assert called == ["on"]
