"""An average of weights has the bits of torch's `AveragedModel`: on any layout, resumed, exported."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import paceline
from paceline.cli.main import main
from paceline.errors import PacelineError
from paceline.models.moe import MoeGpt
from paceline.recipe.schema import MoeModel
from paceline.world import start
from tests.dist.pool import Pool
from tests.train.test_layout_checkpoints import (
    build_gpt,
    build_tied_llama,
    build_trainer,
    plain,
)
from tests.train.test_layouts import Tokens

DECAY = 0.7
State = dict[str, Tensor]


def build_mixture() -> nn.Module:
    section = MoeModel(kind="moe", layers=2, hidden=32, heads=4, experts=4, expert_hidden=16)
    return MoeGpt(section, 64, 8)


MODELS = {"gpt": build_gpt, "tied": build_tied_llama, "mixture": build_mixture}


def go_on(world: Any, kind: str, layout: str, folder: str, num_steps: int, settings: Any) -> list[State]:
    """Take steps; return the weights before the first and after each step, and the average."""
    trainer = build_trainer(layout, MODELS[kind], plain, ema=DECAY, **settings)
    loader = trainer.loader(Tokens(), global_batch_size=10)
    trainer.resume(folder)
    found, last_step = [trainer.whole_state()], trainer.step_number + num_steps
    while trainer.step_number < last_step:
        for share in loader:
            trainer.step(share)
            found.append(trainer.whole_state())
            if trainer.step_number == last_step:
                break
    trainer.save(wait=True)
    with trainer.average.applied():
        found.append(trainer.whole_state())
        averaged = trainer.evaluate(trainer.loader(Tokens(), global_batch_size=10, shuffle=False))
    again = trainer.whole_state()
    assert all(torch.equal(again[name], value) for name, value in found[-2].items()), "the weights are back"
    own = trainer.evaluate(trainer.loader(Tokens(), global_batch_size=10, shuffle=False))
    trainer.close()
    return [*found, {"loss": torch.tensor([averaged.loss, own.loss])}]


def evaluate_plainly(kind: str, state: State) -> float:
    """Return the loss of whole weights in one process, without an average."""
    with start(threads_per_rank=1):
        trainer = build_trainer("", MODELS[kind], plain)
        trainer.model.load_state_dict(state, strict=False)
        return trainer.evaluate(trainer.loader(Tokens(), global_batch_size=10, shuffle=False)).loss


CHAINS = {
    "gpt": ["dp_replicate=2", "dp_shard=2 zero=3", "tp=2", "dp_shard=2 zero=1", "pp=2", "cp=2", ""],
    "sharded": ["dp_shard=2 zero=2", "dp_shard=2 tp=2", "pp=2 dp_shard=2", ""],
    "tied": ["dp_shard=2", "tp=2", "pp=2", ""],
    "mixture": ["dp_shard=2 ep=2", "tp=2", "dp_replicate=2 ep=2"],
}


@pytest.mark.parametrize("chain", CHAINS)
def test_an_average_goes_on_over_layouts(ranks: Pool, tmp_path: Path, chain: str) -> None:
    kind = "gpt" if chain == "sharded" else chain
    settings = {"checkpoint_mode": "sharded", "asynchronous_saves": True} if chain == "sharded" else {}
    expected: AveragedModel | None = None
    for layout in CHAINS[chain]:
        degrees = [int(part.partition("=")[2]) for part in layout.split() if not part.startswith("zero")]
        nproc = 4 if len(degrees) > 1 and "ep" not in layout else max([*degrees, 1])
        found = ranks.run(go_on, nproc, args=(kind, layout, str(tmp_path), 2, settings))[0]
        *states, average, losses = found
        weights = nn.ParameterDict({name.replace(".", "/"): value for name, value in states[0].items()})
        if expected is None:
            expected = AveragedModel(weights, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
        for state in states[1:]:
            for name, value in state.items():
                weights[name.replace(".", "/")].data.copy_(value)
            expected.update_parameters(weights)
        buffers = dict(build_model_buffers(kind))
        for name, value in average.items():
            wanted = states[-1][name] if name in buffers else expected.module[name.replace(".", "/")]
            assert torch.equal(value, wanted), (layout, name)
        assert losses["loss"][0] != losses["loss"][1]
    torch.testing.assert_close(losses["loss"][0].item(), evaluate_plainly(kind, average))
    out = tmp_path / "average.safetensors"
    assert main(["checkpoint", "export", str(tmp_path), str(out), "--average"]) == 0
    exported = load_file(out)
    assert [name for name in exported if not torch.equal(exported[name], average[name])] == []
    assert exported.keys() >= {name for name in average if name not in buffers}


def build_model_buffers(kind: str) -> Any:
    return MODELS[kind]().named_buffers()


def small(layout: str = "", **settings: Any) -> paceline.Trainer:
    torch.manual_seed(0)
    return paceline.Trainer(
        settings.pop("model", None) or nn.Sequential(nn.Linear(4, 7), nn.BatchNorm1d(7), nn.Linear(7, 2)),
        forward=lambda model, batch: model(batch),
        loss=lambda output, batch: (output.square().sum(), len(output)),
        optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.1),
        layout=layout,
        microbatch_size=4,
        **settings,
    )


def test_a_plain_loop_with_torch_s_average_has_the_same_bits() -> None:
    data = torch.randn(24, 4, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 7), nn.BatchNorm1d(7), nn.Linear(7, 2))
    with start(threads_per_rank=1):
        trainer = small(ema=0.9, model=copy.deepcopy(model))
        for batch in data.split(4):
            trainer.step(batch)
        with trainer.average.applied():
            found = {name: each.clone() for name, each in trainer.model.state_dict().items()}
            for wrong in (lambda: trainer.step(data[:4]), lambda: trainer.save()):
                with pytest.raises(PacelineError) as caught:
                    wrong()
                assert caught.value.code == "PL545"
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for batch in data.split(4):
            optimizer.zero_grad()
            (model(batch).square().sum() / 4).backward()
            optimizer.step()
            average.update_parameters(model)
    for name, value in average.module.named_parameters():
        assert torch.equal(found[name], value), name
    torch.testing.assert_close(found["1.running_mean"], model.get_buffer("1.running_mean"))


def test_a_skipped_step_is_not_averaged_and_named_models_have_their_own() -> None:
    with start(threads_per_rank=1):
        trainer = small(ema=0.5)
        trainer.step(torch.ones(4, 4))
        trainer.step(torch.full((4, 4), torch.nan))
        assert trainer.average.num_averaged == 1
        models = {"student": nn.Linear(4, 4), "teacher": nn.Linear(4, 4)}
        both = paceline.Trainer(
            models,
            optimizer={"student": lambda named: torch.optim.SGD([p for _, p in named], lr=0.1)},
            step=lambda update: update("student", lambda models, batch: models["student"](batch).sum()),
            ema={"student": 0.5},
        )
        both.step(torch.ones(4, 4))
        assert list(both.averages) == ["student"]
        assert both.averages["student"].num_averaged == 1


@pytest.mark.parametrize(
    ("ema", "code"), [(1.0, "PL400"), (-0.1, "PL400"), ("0.9", "PL400"), ({"b": 0.9}, "PL404")]
)
def test_impossible_decays_are_refused(ema: Any, code: str) -> None:
    with start(threads_per_rank=1), pytest.raises(PacelineError) as caught:
        small(ema=ema)
    assert caught.value.code == code


def test_another_decay_and_a_missing_average_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with start(threads_per_rank=1):
        trainer = small()
        trainer.resume(tmp_path)
        trainer.step(torch.randn(4, 4))
        trainer.save(wait=True)
        with pytest.raises(PacelineError, match="ema=") as caught:
            trainer.average  # noqa: B018
        assert caught.value.code == "PL404"
        trainer.close()
        with pytest.raises(PacelineError, match=r"ema was None and is 0\.9") as caught:
            small(ema=0.9).resume(tmp_path)
        assert caught.value.code == "PL515"
        trainer = small(ema=0.9)
        trainer.resume(tmp_path, accept=["ema"])
        with trainer.average.applied():  # nothing was averaged yet
            assert not torch.equal(next(trainer.model.parameters()), next(small().model.parameters()))
    command = ["checkpoint", "export", str(tmp_path), str(tmp_path / "out"), "--json"]
    assert main([*command, "--average"]) == 2
    captured = capsys.readouterr()
    assert "PL514" in captured.out + captured.err
    assert main(command) == 0
    assert json.loads(capsys.readouterr().out)["bytes"] > 0


def copied(world: Any, layout: str) -> str:
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    before = AveragedModel(model)
    trainer = small(layout, model=model, example=torch.ones(4, 4))
    try:
        trainer.track(ema=before if world.rank >= 0 and "pp" in layout else AveragedModel(trainer.model))
        return ""
    except PacelineError as error:
        return error.code


@pytest.mark.parametrize(
    ("layout", "code"), [("dp_shard=2", "PL929"), ("dp_replicate=2", ""), ("pp=2", "PL929")]
)
def test_torch_s_average_of_a_divided_model_is_refused_with_ours(ranks: Pool, layout: str, code: str) -> None:
    assert ranks.run(copied, args=(layout,)) == [code] * 2
