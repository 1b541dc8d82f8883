"""Recipes with a model of transformers: the losses of a plain loop, and back into a folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.cli.main import main
from paceline.data import build_data
from paceline.errors import PacelineError
from paceline.recipe import load_recipe

transformers = pytest.importorskip("transformers")
RECIPE = """
[model]
kind = "hf"
folder = "model"
[data]
kind = "text"
files = ["text.txt"]
tokenizer = "model/tokenizer.json"
seq_len = 32
valid_fraction = 0
cache_dir = "cache"
[train]
steps = 3
global_batch_size = 9
microbatch_size = 2
dtype = "fp32"
clip_norm = 0
[optimizer]
kind = "sgd"
lr = 0.1
momentum = 0.0
weight_decay = 0.0
schedule = "constant"
[checkpoint]
every = 3
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    tokenizers = pytest.importorskip("tokenizers")
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    transformers.LlamaForCausalLM(config).save_pretrained("model")
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.BPE({letter: number for number, letter in enumerate(sorted(alphabet))}, [])
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.save("model/tokenizer.json")
    Path("text.txt").write_text("".join(chr(97 + (n * n) % 23) for n in range(9 * 32 + 1)))
    Path("recipe.toml").write_text(RECIPE)
    return tmp_path


def follow_by_hand() -> tuple[list[float], Any]:
    """Train on the whole data in every step, as the recipe does in another order."""
    data = build_data(load_recipe("recipe.toml"))
    assert len(data.train) == 9
    rows = [data.train[n] for n in range(9)]
    ids, targets = (torch.stack([row[key] for row in rows]) for key in ("ids", "targets"))
    model = transformers.LlamaForCausalLM.from_pretrained("model").train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        loss = torch.nn.functional.cross_entropy(model(ids).logits.flatten(0, 1), targets.flatten())
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return losses, model


def test_a_recipe_tunes_a_model_of_transformers(place: Path) -> None:
    expected, plain = follow_by_hand()
    for nproc, layout in ((1, "dp_shard=1"), (2, "tp=2")):
        command = ["train", "recipe.toml", "--nproc", str(nproc), "--out", layout]
        assert main([*command, "--set", f"layout.{layout}"]) == 0
        rows = [json.loads(line) for line in (place / layout / "metrics.jsonl").read_text().splitlines()]
        assert [row["loss"] for row in rows] == pytest.approx(expected, rel=1e-6)
    assert main(["checkpoint", "export", "tp=2", "out", "--hf", "model"]) == 0
    again = transformers.LlamaForCausalLM.from_pretrained("out")
    for name, each in plain.named_parameters():
        torch.testing.assert_close(again.get_parameter(name), each)


@pytest.mark.parametrize(
    ("setting", "part"),
    [
        ("model.folder=nowhere", "is no folder on this machine"),
        ("data.tokenizer=bytes", "know the token ids of their own tokenizer"),
        ("data.kind=masked_text", "PL116"),
        ("optimizer.kind=muon", "PL116"),
    ],
)
def test_what_does_not_fit_is_refused(
    place: Path, capsys: pytest.CaptureFixture[str], setting: str, part: str
) -> None:
    assert main(["train", "recipe.toml", "--set", setting, "--out", "run"]) == 2
    assert part in capsys.readouterr().err


def test_a_vocabulary_that_is_too_small_is_refused(place: Path) -> None:
    from paceline.huggingface.factory import from_recipe

    section: Any = load_recipe("recipe.toml").model
    with pytest.raises(PacelineError, match=r"300.*\[PL942\]"):
        from_recipe(section, 301)()
