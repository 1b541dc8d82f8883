"""`paceline import`: each key of files of DeepSpeed and Accelerate is mapped, left out or refused by name."""

from __future__ import annotations

import json
import tomllib
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import pytest
import torch

import paceline
from paceline.cli.main import main
from paceline.recipe import Layout, load_recipe

BERT = {
    "train_batch_size": 4096,
    "train_micro_batch_size_per_gpu": 32,
    "steps_per_print": 1000,
    "prescale_gradients": False,
    "optimizer": {
        "type": "Adam",
        "params": {"lr": 6e-3, "betas": [0.9, 0.99], "eps": 1e-8, "weight_decay": 0.01},
    },
    "gradient_clipping": 1.0,
    "wall_clock_breakdown": False,
    "fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 16},
    "sparse_attention": {"mode": "fixed", "block": 16},
}
ZERO_3 = {
    "bf16": {"enabled": True},
    "fp16": {"enabled": False, "loss_scale_window": 1000},
    "optimizer": {"type": "AdamW", "params": {"lr": "3e-5"}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {
            "warmup_min_lr": 0,
            "warmup_max_lr": 3e-5,
            "warmup_num_steps": 100,
            "total_num_steps": 2000,
            "warmup_type": "linear",
        },
    },
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu", "pin_memory": True},
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": 5e8,
        "stage3_prefetch_bucket_size": 5e7,
        "stage3_param_persistence_threshold": 1e5,
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "gradient_accumulation_steps": 4,
    "gradient_clipping": 0.5,
    "train_batch_size": 128,
    "train_micro_batch_size_per_gpu": 4,
}
AUTO = {
    "fp16": {"enabled": "auto"},
    "zero_optimization": {"stage": 2, "allgather_partitions": True, "allgather_bucket_size": 2e8},
    "gradient_accumulation_steps": "auto",
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
}
NVME = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 8,
    "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/local"}},
    "optimizer": {"type": "Lamb", "params": {"lr": 1e-3}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
    "curriculum_learning": {"enabled": True, "min_difficulty": 8},
    "flops_profiler": {"enabled": True, "profile_step": 1},
}
SGD = {
    "train_batch_size": 64,
    "zero_optimization": {"stage": 1, "reduce_scatter": True},
    "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-4}},
    "tensorboard": {"enabled": True, "output_path": "logs"},
    "curriculum_learning": {"enabled": False},
    "dump_state": True,
}
DDP = """
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: MULTI_GPU
downcast_bf16: 'no'
gpu_ids: all
machine_rank: 1
main_process_ip: 10.0.0.1
main_process_port: 29501
main_training_function: main
mixed_precision: fp16
num_machines: 2
num_processes: 16
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: false
"""
FSDP = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_backward_prefetch_policy: BACKWARD_PRE
  fsdp_offload_params: true
  fsdp_sharding_strategy: HYBRID_SHARD
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer
  fsdp_use_orig_params: true
  fsdp_activation_checkpointing: true
machine_rank: 0
mixed_precision: bf16
num_machines: 2
num_processes: 8
"""
DEEPSPEED = """
compute_environment: LOCAL_MACHINE
deepspeed_config:
  gradient_accumulation_steps: 2
  gradient_clipping: 1.0
  offload_optimizer_device: none
  offload_param_device: none
  zero3_init_flag: false
  zero_stage: 2
distributed_type: DEEPSPEED
mixed_precision: fp8
num_machines: 1
num_processes: 4
"""


def read(
    capsys: pytest.CaptureFixture[str], folder: Path, config: Any, *words: str
) -> tuple[int, dict[str, Any]]:
    path = folder / ("config.yaml" if isinstance(config, str) else "config.json")
    path.write_text(config if isinstance(config, str) else json.dumps(config))
    code = main(["import", str(path), "--json", *words])
    return code, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("config", "layout", "refused"),
    [
        (BERT, "", ["sparse_attention.mode", "sparse_attention.block"]),
        (ZERO_3, "offload=cpu dp_shard=auto", []),
        (
            AUTO,
            "dp_shard=auto zero=2",
            [
                *("fp16.enabled", "gradient_accumulation_steps", "train_batch_size"),
                "train_micro_batch_size_per_gpu",
            ],
        ),
        (
            NVME,
            "dp_shard=auto",
            [
                *("zero_optimization.offload_param.device", "optimizer.type", "curriculum_learning.enabled"),
                *("curriculum_learning.min_difficulty", "scheduler.params.warmup_type", "train_batch_size"),
            ],
        ),
        (SGD, "dp_shard=auto zero=1", []),
        (DDP, "", []),
        (FSDP, "offload=cpu recompute=block dp_replicate=2 dp_shard=4", []),
        (DEEPSPEED, "dp_shard=auto zero=2", ["mixed_precision"]),
    ],
    ids=["bert", "zero 3", "auto", "nvme", "sgd", "ddp", "fsdp", "accelerate's deepspeed"],
)
def test_each_key_is_mapped_or_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, config: Any, layout: str, refused: list[str]
) -> None:
    code, found = read(capsys, tmp_path, config)
    assert sorted(found["refused"]) == sorted(refused)
    assert code == bool(refused)
    assert found["layout"] == layout
    Layout.parse(layout)
    for each in found["keys"]:
        assert each["to"] if each["state"] == "mapped" else each["says"], each
        name = each["key"].split(".")[0]
        assert each["state"] == "refused" or (name in config), each


def test_a_recipe_is_written_and_loads(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "recipe.toml"
    code, found = read(capsys, tmp_path, ZERO_3, "-o", str(out))
    assert code == 0
    text = out.read_text(encoding="utf-8")
    assert tomllib.loads(text) == found["recipe"]
    out.write_text(text + '[model]\nkind = "gpt"\n[data]\nkind = "text"\n', encoding="utf-8")
    recipe = load_recipe(out)
    train, optimizer = recipe.train, recipe.optimizer
    assert (train.global_batch_size, train.microbatch_size, train.steps) == (128, 4, 2000)
    assert (train.dtype, train.clip_norm) == ("bf16", 0.5)
    assert optimizer.kind == "adamw"
    # DeepSpeed's defaults, not those of a recipe
    assert (optimizer.lr, optimizer.betas, optimizer.weight_decay) == (3e-5, [0.9, 0.999], 0.0)
    assert (optimizer.schedule, optimizer.warmup_steps, optimizer.min_lr_ratio) == ("linear", 100, 0.0)
    assert main(["import", str(tmp_path / "config.json"), "-o", str(out)]) == 2
    assert "[PL742]" in capsys.readouterr().err


def test_numbers_follow_from_the_ranks(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 8}
    assert read(capsys, tmp_path, config)[1]["refused"] == ["train_batch_size"]
    code, found = read(capsys, tmp_path, config, "--ranks", "4")
    assert (code, found["recipe"]["train"]["global_batch_size"]) == (0, 64)
    assert read(capsys, tmp_path, {**config, "train_batch_size": 60}, "--ranks", "4")[0] == 1
    assert found["recipe"]["train"]["clip_norm"] == 0.0
    params = {"type": "AdamW", "params": {"torch_adam": True}}
    recipe = read(capsys, tmp_path, {"optimizer": params})[1]["recipe"]
    assert recipe["optimizer"]["weight_decay"] == 0.01


def test_a_rate_of_the_scheduler_replaces_the_optimizers(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    params = {"warmup_num_steps": 5, "warmup_type": "linear"}
    config = {
        "optimizer": {"type": "Adam", "params": {"lr": 0.5}},
        "scheduler": {"type": "WarmupLR", "params": params},
    }
    assert read(capsys, tmp_path, config)[1]["recipe"]["optimizer"]["lr"] == 1e-3
    master = {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_other": 1}}
    assert read(capsys, tmp_path, master)[1]["refused"] == [
        "bf16.bf16_master_weights_and_grads",
        "bf16.bf16_other",
    ]
    both = {"bf16": {"enabled": True}, "fp16": {"enabled": True}}
    assert read(capsys, tmp_path, both)[1]["refused"] == ["fp16.enabled"]
    halves = {"train_batch_size": 2.5, "optimizer": {"type": "Adam", "params": {"adam_w_mode": False}}}
    assert read(capsys, tmp_path, halves)[1]["refused"] == [
        "train_batch_size",
        "optimizer.params.adam_w_mode",
    ]
    offload = {"zero_optimization": {"stage": 0, "offload_optimizer": {"device": "cpu"}}}
    assert read(capsys, tmp_path, offload)[1]["refused"] == ["zero_optimization.offload_optimizer.device"]


def test_a_command_starts_accelerates_ranks(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert read(capsys, tmp_path, DDP)[1]["command"] == (
        "paceline run --nnodes 2 --node-rank 1 --master-addr 10.0.0.1 --master-port 29501 "
        "--nproc-per-node 8 train.py"
    )
    (tmp_path / "a.yaml").write_text(FSDP)
    assert main(["import", str(tmp_path / "a.yaml")]) == 0
    shown = capsys.readouterr().out
    assert "mapped    fsdp_config.fsdp_offload_params = true: layout.offload = cpu" in shown
    assert "dtype='bf16'" in shown
    (tmp_path / "a.yaml").write_text("distributed_type: NO\nmain_process_ip: null\ndebug: 2001-01-01\n")
    assert main(["import", str(tmp_path / "a.yaml"), "--json"]) == 0
    (tmp_path / "ds_config").write_text(json.dumps(ZERO_3))
    assert main(["import", str(tmp_path / "ds_config")]) == 0
    shown = capsys.readouterr().out
    assert "\nTrainer(..., layout='offload=cpu dp_shard=auto', microbatch_size=4, " in shown
    # DeepSpeed's rate rises to 3e-5 in 100 steps, and falls to 0 at step 2000.
    words = "schedule=paceline.schedule('linear', num_steps=2000, warmup_steps=100, min_lr_ratio=0.0)"
    assert words in shown
    weights = [torch.nn.Parameter(torch.ones(1))]
    optimizer = torch.optim.AdamW(weights, lr=3e-5)
    scheduler, rates = eval(words.removeprefix("schedule="), {"paceline": paceline})(optimizer), []
    for _ in range(2000):
        optimizer.step()
        scheduler.step()
        rates.append(scheduler.get_last_lr()[0])
    assert rates[98] == pytest.approx(3e-5)
    assert rates[1999] == pytest.approx(0.0, abs=1e-8)
    (tmp_path / "a.json").write_text('{"a":' * 900 + "1" + "}" * 900)
    assert main(["import", str(tmp_path / "a.json")]) == 1
    with pytest.raises(SystemExit):
        main(["import", str(tmp_path / "a.json"), "--ranks", "0"])


@pytest.mark.parametrize("text", ["[1, 2]", "{", "3", "{}", "\x00", "a: &b [*b]"])
@pytest.mark.parametrize("name", ["a.json", "a.yaml"])
def test_other_files_are_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, name: str
) -> None:
    (tmp_path / name).write_text(text)
    assert main(["import", str(tmp_path / name)]) == 2
    assert "[PL741]" in capsys.readouterr().err
    assert main(["import", str(tmp_path / "absent")]) == 2
    assert "[PL741]" in capsys.readouterr().err


def import_arguments(place: Path, capsys: pytest.CaptureFixture[str], **given: Any) -> dict[str, Any]:
    file = place / "training_args.json"
    file.write_text(json.dumps({"output_dir": "out", **given}))
    main(["import", str(file), "--ranks", "4", "--json"])
    return dict(json.loads(capsys.readouterr().out))


def test_training_arguments_have_the_defaults_of_transformers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = {"max_steps": 7, "gradient_accumulation_steps": 2, "warmup_steps": 3, "fsdp": "full_shard"}
    found = import_arguments(tmp_path, capsys, **given)
    assert not found["refused"]
    assert found["layout"] == "dp_shard=auto"
    assert found["recipe"]["train"] == {
        "steps": 7,
        "microbatch_size": 8,
        "global_batch_size": 64,
        "clip_norm": 1.0,
        "seed": 42,
    }
    assert found["recipe"]["optimizer"] == {
        "kind": "adamw",
        "lr": 5e-5,
        "betas": [0.9, 0.999],
        "eps": 1e-8,
        "weight_decay": 0.0,
        "schedule": "linear",
        "warmup_steps": 3,
        "min_lr_ratio": 0.0,
    }


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("neftune_noise_alpha", 5.0),
        ("lr_scheduler_type", "polynomial"),
        ("lr_scheduler_kwargs", {"num_cycles": 2}),
        ("warmup_steps", 0.1),
        ("optim", "adafactor"),
        ("label_smoothing_factor", 0.1),
        ("train_sampling_strategy", "group_by_length"),
        ("dataloader_drop_last", True),
        ("fsdp", "hybrid_shard"),
        ("deepspeed", "ds.json"),
        ("accelerator_config", {"split_batches": True}),
        ("data_seed", 3),
        ("unheard_of", 1),
    ],
)
def test_training_arguments_without_counterpart_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, value: Any
) -> None:
    (refused,) = import_arguments(tmp_path, capsys, **{name: value})["refused"]
    assert refused.partition(".")[0] == name


def test_no_argument_of_transformers_is_unknown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = pytest.importorskip("transformers.training_args").TrainingArguments
    # Fields, as making one would need accelerate.
    defaults = {each.name: each.default for each in fields(arguments) if each.default is not MISSING}
    plain = {name: each for name, each in defaults.items() if isinstance(each, bool | int | float | str)}
    assert len(plain) > 50
    found = import_arguments(tmp_path, capsys, **plain)
    assert found["refused"] == []
