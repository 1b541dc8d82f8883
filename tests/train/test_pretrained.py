"""Models of transformers from a folder into a layout, and back into a folder, with every bit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import paceline
from paceline.cli.main import main
from paceline.parallel.construct import hand_out
from tests.dist.pool import Pool

transformers = pytest.importorskip("transformers")
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
T5 = {"vocab_size": 64, "d_model": 32, "d_ff": 64, "num_layers": 2, "num_heads": 4, "d_kv": 8}
T5 |= {"decoder_start_token_id": 0}
BAD = ("no config", "pickled", "empty", "lost", "cut", "lying", "broken", "outside", "short")
IDS = torch.arange(64).reshape(4, 16) % 60


def build(name: str) -> nn.Module:
    t = transformers
    llama = SIZES | {"vocab_size": 64, "num_key_value_heads": 2}
    torch.manual_seed(1)
    makers: dict[str, Any] = {
        "llama": lambda: t.LlamaForCausalLM(t.LlamaConfig(**llama, tie_word_embeddings=True)),
        "qwen3": lambda: t.Qwen3ForCausalLM(t.Qwen3Config(**llama, head_dim=8)),
        "mixtral": lambda: t.MixtralForCausalLM(t.MixtralConfig(**llama, num_local_experts=4)),
        "gpt2": lambda: t.GPT2LMHeadModel(
            t.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=32)
        ),
        "t5": lambda: t.T5ForConditionalGeneration(
            t.T5Config(
                vocab_size=64,
                d_model=32,
                d_ff=64,
                num_layers=2,
                num_heads=4,
                d_kv=8,
                decoder_start_token_id=0,
            )
        ),
        "bert": lambda: t.BertForMaskedLM(t.BertConfig(**SIZES, vocab_size=64)),
        "vit": lambda: t.ViTForImageClassification(t.ViTConfig(**SIZES, image_size=16, patch_size=4)),
    }
    return makers[name]()


def make_batch(name: str) -> dict[str, torch.Tensor]:
    if name == "vit":
        pixels = torch.arange(4 * 3 * 16 * 16.0).reshape(4, 3, 16, 16) / 3000
        return {"pixel_values": pixels, "labels": torch.tensor([0, 1, 0, 1])}
    return {"input_ids": IDS, "labels": IDS}


def compute_logits(model: nn.Module, name: str) -> torch.Tensor:
    torch.set_num_threads(1)  # as on a rank: their number changes the last bits
    with torch.no_grad():
        return model.eval()(**make_batch(name)).logits


def tune(world: paceline.World, name: str, folder: str, run: str, layout: str) -> torch.Tensor | None:
    plain = build(name)
    with mock.patch.object(hand_out, "_BLOCK_BYTES", 700):  # so that every matrix has several blocks
        trainer = paceline.Trainer(
            paceline.pretrained(type(plain), folder),
            forward=lambda model, batch: model(**batch),
            loss=lambda output, batch: output.loss,
            optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.1),
            layout=layout,
            example=make_batch(name),
            microbatch_size=2,
            keep=1,
        )
    trainer.resume(run)
    before = trainer.whole_state()
    if world.is_main:
        expected, buffers = plain.state_dict(), dict(trainer.model.named_buffers())
        assert before.keys() == expected.keys()
        assert all(torch.equal(before[key], each) for key, each in expected.items())
        assert all(torch.equal(buffers[key], each) for key, each in plain.named_buffers())
    rows = [{key: each[n] for key, each in make_batch(name).items()} for n in range(4)]
    for batch in trainer.loader(rows, global_batch_size=4, epochs=2):
        trainer.step(batch)
    trainer.save(wait=True)
    trainer.gather_into(plain)
    return compute_logits(plain, name) if world.is_main else None


@pytest.mark.parametrize(
    ("name", "layout", "nproc"),
    [
        ("gpt2", "tp=2", 2),
        ("llama", "dp_shard=3", 3),
        pytest.param("mixtral", "dp_shard=2 ep=2", 4, marks=pytest.mark.slow),
        *(
            pytest.param(name, "dp_shard=2 tp=2", 4, marks=pytest.mark.slow)
            for name in ("llama", "qwen3", "gpt2", "t5", "bert", "vit")
        ),
    ],
)
def test_a_tuned_model_goes_back_with_every_bit(
    ranks: Pool, tmp_path: Path, name: str, layout: str, nproc: int
) -> None:
    folder, out = tmp_path / "in", tmp_path / "out"
    build(name).save_pretrained(folder, max_shard_size="40KB")
    assert len(list(folder.glob("*.safetensors"))) >= 3
    (folder / "tokenizer.json").write_text("{}")
    expected = ranks.run(tune, nproc=nproc, args=(name, str(folder), str(tmp_path / "run"), layout))[0]
    assert main(["checkpoint", "export", str(tmp_path / "run"), str(out), "--hf", str(folder)]) == 0
    again = type(build(name)).from_pretrained(out)
    assert torch.equal(compute_logits(again, name), expected)
    assert not torch.equal(compute_logits(build(name), name), expected)
    stored, given = load_file(out / "model.safetensors"), {}
    for path in folder.glob("*.safetensors"):
        given |= load_file(path)
    assert stored.keys() == given.keys()
    assert (out / "tokenizer.json").read_text() == "{}"


def refuse(world: paceline.World, place: str) -> list[str]:
    """Return what each of the bad folders says."""
    said = []

    def attempt(name: str, factory: Any = None, **kwargs: Any) -> None:
        with pytest.raises(paceline.PacelineError) as caught:
            paceline.Trainer(
                paceline.pretrained(factory or transformers.LlamaForCausalLM, f"{place}/{name}", **kwargs),
                forward=lambda model, batch: model(**batch),
                loss=lambda output, batch: output.loss,
                optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.1),
                layout="dp_replicate=2",
            )
        said.append(str(caught.value))

    for name in (
        "missing",
        "no config",
        "pickled",
        "empty",
        "lost",
        "cut",
        "lying",
        "broken",
        "outside",
        "short",
    ):
        attempt(name)
    attempt("good", lambda: build("qwen3"))
    attempt("good", nn.Linear)
    config = transformers.LlamaConfig(**SIZES, num_key_value_heads=2, vocab_size=65, tie_word_embeddings=True)
    attempt("good", lambda: transformers.LlamaForCausalLM(config))
    return said


def test_bad_folders_are_refused_on_every_rank(ranks: Pool, tmp_path: Path) -> None:
    good = tmp_path / "good"
    build("llama").save_pretrained(good, max_shard_size="40KB")
    first, second, *_ = sorted(path.name for path in good.glob("*.safetensors"))
    for name in BAD:
        shutil.copytree(good, tmp_path / name)
    (tmp_path / "no config" / "config.json").unlink()
    for name in ("pickled", "empty"):
        for path in (tmp_path / name).glob("model*"):
            path.unlink()
    (tmp_path / "pickled" / "pytorch_model.bin").write_bytes(b"1")
    (tmp_path / "lost" / second).unlink()
    (tmp_path / "cut" / second).write_bytes((good / second).read_bytes()[:-100])
    index = json.loads((good / "model.safetensors.index.json").read_text())

    def write_index(name: str, table: dict[str, str]) -> None:
        (tmp_path / name / "model.safetensors.index.json").write_text(json.dumps({"weight_map": table}))

    table = index["weight_map"]
    write_index("lying", table | {next(name for name in table if table[name] != first): first})
    (tmp_path / "broken" / "model.safetensors.index.json").write_text("{")
    write_index("outside", table | {"x": "../secret.safetensors"})
    kept = load_file(good / second)
    lost = sorted(kept)[0]
    save_file({key: each for key, each in kept.items() if key != lost}, tmp_path / "short" / second)
    write_index("short", {key: each for key, each in table.items() if key != lost})
    one, two = ranks.run(refuse, nproc=2, args=(str(tmp_path),))
    expected = [
        "is no folder on this machine",
        "has no config.json",
        "has pytorch_model.bin, and no safetensors",
        "has neither model.safetensors nor",
        f"lacks {second}",
        f"{second} cannot be read",
        f"{first} has no tensor",
        "is no index of weights",
        "is no index of weights",
        f"the folder lacks 1 of the model's 20 parameters: {lost}",
        "the folder lacks",
        "A class is one of transformers",
        "has the shape [64, 32] in the folder and [65, 32] in the model",
    ]
    for told in (one, two):
        for text, part in zip(told, expected, strict=True):
            assert part in text
            assert ("PL738" if part.startswith(("the folder lacks", "has the shape")) else "PL737") in text


def classify(world: paceline.World, folder: str) -> dict[str, torch.Tensor]:
    config = transformers.BertConfig.from_pretrained(folder)
    trainer = paceline.Trainer(
        paceline.pretrained(
            lambda: transformers.BertForSequenceClassification(config),
            folder,
            new=["classifier.*", "*.pooler.*"],
        ),
        forward=lambda model, batch: model(**batch),
        loss=lambda output, batch: output.loss,
        optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.1),
    )
    return trainer.whole_state()


def test_a_new_head_starts_alike_on_any_number_of_ranks(ranks: Pool, tmp_path: Path) -> None:
    build("bert").save_pretrained(tmp_path)
    given = load_file(tmp_path / "model.safetensors")
    one, two = (ranks.run(classify, nproc=n, args=(str(tmp_path),))[0] for n in (1, 2))
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert all(torch.equal(one[name], each) for name, each in given.items() if name in one)
    assert 0 < one["classifier.weight"].abs().max() < 1


def test_exports_that_cannot_be_are_refused(
    ranks: Pool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, run = tmp_path / "in", tmp_path / "run"
    build("llama").save_pretrained(folder)
    ranks.run(tune, args=("llama", str(folder), str(run), ""))
    build("qwen3").save_pretrained(tmp_path / "other")
    (tmp_path / "empty").mkdir()
    for source, out, part in (
        ("in", "in", "PL513"),
        ("nowhere", "out", "PL737"),
        ("empty", "out", "PL737"),
        ("other", "out", "PL739"),
        ("in", "no/out", "PL508"),
    ):
        command = ["checkpoint", "export", str(run), str(tmp_path / out), "--hf", str(tmp_path / source)]
        assert main(command) == 2
        assert part in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    command = [
        "checkpoint",
        "export",
        str(run),
        str(tmp_path / "out"),
        "--hf",
        str(folder),
        "--dtype",
        "bf16",
    ]
    assert main(command) == 0
    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "out")
    assert model.dtype == torch.bfloat16
