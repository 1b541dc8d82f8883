"""`paceline import FILE`: what Paceline has for each key of another tool's configuration."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.errors import PacelineError, import_optional

if TYPE_CHECKING:
    from paceline.recipe.foreign_configs import Imported

_DESCRIPTION = """
Reads a DeepSpeed JSON, an Accelerate YAML or the TrainingArguments of transformers
(`args.to_json_string()`), and names for each key what Paceline has for it, why it is left
out, or why it is refused. Prints the layout, the arguments of Trainer, the sections of a recipe and the
command that starts ranks. Exits with 1 if a key that may change results is refused.
"""
_YAML = (".yaml", ".yml")
_OPTIONS = ("lr", "betas", "eps", "weight_decay", "momentum", "nesterov")
_SCHEDULE = ("num_steps", "warmup_steps", "min_lr_ratio")
_RATE = {"lr": 1e-3, "weight_decay": 0.0}
# Where a file leaves out a number, DeepSpeed's own default holds, and not that of a recipe.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "adamw": {"kind": "adamw", **_RATE, "betas": [0.9, 0.999], "eps": 1e-8},
    "sgd": {"kind": "sgd", **_RATE, "momentum": 0.0},
}
# Of TrainingArguments, whose file may hold a part of them.
_ARGUMENTS: dict[str, Any] = {
    "train.microbatch_size": 8, "train.clip_norm": 1.0, "train.epochs": 3, "train.seed": 42,
    "optimizer.lr": 5e-5, "optimizer.schedule": "linear",
}  # fmt: skip


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command's parser."""
    parser = subparsers.add_parser(
        "import",
        help="read a configuration of DeepSpeed, Accelerate or transformers",
        description=_DESCRIPTION,
    )
    parser.add_argument(
        "file", metavar="FILE", type=Path, help="ds_config.json, accelerate_config.yaml or training_args.json"
    )
    parser.add_argument(
        "-o", dest="out", metavar="RECIPE", type=Path, help="write the recipe's sections here"
    )
    parser.add_argument("--ranks", type=_read_ranks, metavar="N", help="ranks of the run")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def _read_ranks(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text[:9]) == int(text):
        raise argparse.ArgumentTypeError(f"{text[:20]!r} is no number of ranks")
    return int(text)


def run(args: argparse.Namespace) -> int:
    """Run the command, and return its exit code."""
    import tomllib

    import tomli_w

    from paceline.recipe.foreign_configs import translate
    from paceline.recipe.load import BUILT_IN, parse_recipe

    config = _read(args.file)
    is_accelerate = args.file.suffix in _YAML or "distributed_type" in config
    is_trainer = not is_accelerate and "output_dir" in config
    outcomes = translate(config, "accelerate" if is_accelerate else "trainer" if is_trainer else "deepspeed")
    kind = config.get("distributed_type")
    for number, each in enumerate(outcomes):
        section = each.key.partition("_config.")[0]
        if is_accelerate and section in ("fsdp", "deepspeed") and section.upper() != kind:
            says = f"distributed_type is {kind}"
            outcomes[number] = replace(each, state="left out", says=says, to="")
    found = _collect(outcomes)
    command = _settle_accelerate(found, outcomes) if is_accelerate else ""
    if is_trainer:
        _settle_trainer(found, outcomes, args.ranks)
    elif not is_accelerate:
        _settle_deepspeed(found, outcomes, args.ranks)
    _settle_layout(found, outcomes)
    table: dict[str, dict[str, Any]] = {}
    for key, value in found.items():
        section, _, name = key.partition(".")
        table.setdefault(section, {})[name] = value
    refused = [each for each in outcomes if each.state == "refused"]
    if not refused:
        base = tomllib.loads((BUILT_IN / "gpt-stdlib.toml").read_text(encoding="utf-8"))
        train = table.get("train", {})
        train = {} | ({} if "epochs" in train else {"steps": 1 << 40}) | train
        train.setdefault("microbatch_size", 1)
        train.setdefault("global_batch_size", train["microbatch_size"])
        parse_recipe({**base, "optimizer": {}, **table, "train": train}, where=str(args.file))
    text = tomli_w.dumps(table)
    layout = " ".join(f"{name}={value}" for name, value in table.get("layout", {}).items())
    if args.out and not refused:
        _write(args.out, f"# From {args.file.name}. Add [model], [data] and the length of the run.\n\n{text}")
    trainer = _list_arguments(found, layout)
    shown = {"layout": layout, "trainer": trainer, "recipe": table, "command": command}
    if args.json:
        keys = [asdict(each) for each in outcomes]
        print(json.dumps({**shown, "keys": keys, "refused": [each.key for each in refused]}, default=str))
        return 1 if refused else 0
    for each in outcomes:
        becomes = f"{each.to} = {each.becomes}" if each.to else ""
        says = ": ".join(filter(None, (becomes, each.says)))
        print(f"{each.state:<9} {each.key} = {json.dumps(each.value, default=str)}: {says}")
    arguments = "".join(f", {name}={value!r}" for name, value in trainer.items())
    kind = {"adamw": "AdamW", "sgd": "SGD"}.get(str(found.get("optimizer.kind")))
    if kind:
        options = {name: value for name, value in table["optimizer"].items() if name in _OPTIONS}
        words = "".join(f", {name}={value!r}" for name, value in options.items())
        arguments += f", optimizer=lambda named: torch.optim.{kind}([p for _, p in named]{words})"
        falls = {"num_steps": found.get("train.steps", "NUM_STEPS")} | table["optimizer"]
        words = "".join(f", {name}={falls[name]}" for name in _SCHEDULE if name in falls)
        arguments += f", schedule=paceline.schedule({falls['schedule']!r}{words})"
    ends = [name for name in ("global_batch_size", "epochs") if f"train.{name}" in found]
    words = "".join(f", {name}={found[f'train.{name}']}" for name in ends)
    loader = f"\ntrainer.loader(data{words})" if "global_batch_size" in ends else ""
    print(f"\nTrainer(...{arguments}){loader}\n\n{text}" + (f"\n{command}" if command else ""))
    if refused:
        print(
            f"\nrefused: {len(refused)} of {len(outcomes)} keys" + (", nothing is written" * bool(args.out))
        )
    return 1 if refused else 0


def _collect(outcomes: list[Imported]) -> dict[str, Any]:
    """Return the values by what they become, and refuse a key that contradicts another."""
    found: dict[str, Any] = {}
    for number, each in enumerate(outcomes):
        if each.state != "mapped":
            continue
        if each.key == "scheduler.params.warmup_max_lr":
            found["warmup_max_lr"] = each.becomes
        elif found.setdefault(each.to, each.becomes) != each.becomes:
            says = f"another key makes {each.to} {found[each.to]}"
            outcomes[number] = replace(each, state="refused", says=says, to="")
    return found


def _refuse(outcomes: list[Imported], key: str, value: Any, says: str) -> None:
    from paceline.recipe.foreign_configs import Imported

    outcomes[:] = [each for each in outcomes if each.key != key] + [Imported(key, value, "refused", says)]


def _settle_deepspeed(found: dict[str, Any], outcomes: list[Imported], ranks: int | None) -> None:
    """Fill in what follows from several keys, and the defaults of DeepSpeed."""
    keys = {each.key for each in outcomes}
    schedule, peak = found.get("optimizer.schedule"), found.pop("warmup_max_lr", 1e-3)
    if schedule and "scheduler.params.warmup_type" not in keys:
        says = "DeepSpeed's default is log: pass Trainer(schedule=...), or write linear"
        _refuse(outcomes, "scheduler.params.warmup_type", None, says)
    if schedule:
        found.setdefault("optimizer.warmup_steps", 1000)
        if schedule != "cosine":  # the others replace the optimizer's rate
            found["optimizer.lr"] = peak
        if schedule != "constant":
            found.setdefault("optimizer.min_lr_ratio", 1e-4 if schedule == "cosine" else 0.0)
    kind = found.get("optimizer.kind")
    if kind == "adamw" and any(each.key.endswith("torch_adam") and each.value for each in outcomes):
        found.setdefault("optimizer.weight_decay", 0.01)  # torch's default
    for name, value in _DEFAULTS.get(str(kind), {}).items():
        found.setdefault(f"optimizer.{name}", value)
    if kind:
        found.setdefault("optimizer.schedule", "constant")
    found.setdefault("train.clip_norm", 0.0)
    _settle_batch(found, outcomes, ranks)


def _settle_trainer(found: dict[str, Any], outcomes: list[Imported], ranks: int | None) -> None:
    """Fill in what follows from several arguments, and the defaults of TrainingArguments."""
    for name, value in _ARGUMENTS.items():
        if name != "train.epochs" or "train.steps" not in found:
            found.setdefault(name, value)
    if "train.steps" in found:
        found.pop("train.epochs", None)  # as there
    kind, betas = (
        found.setdefault("optimizer.kind", "adamw"),
        [found.pop("beta1", 0.9), found.pop("beta2", 0.999)],
    )
    if kind == "adamw":
        found["optimizer.betas"] = betas
    else:
        found.pop("optimizer.eps", None)
    for name, value in _DEFAULTS[kind].items():
        found.setdefault(f"optimizer.{name}", value)
    if found["optimizer.schedule"] != "constant":
        found["optimizer.min_lr_ratio"] = 0.0
    found.setdefault("accumulation", 1)
    _settle_batch(found, outcomes, ranks)


def _settle_batch(found: dict[str, Any], outcomes: list[Imported], ranks: int | None) -> None:
    """Find the global batch."""
    whole, part, turns = "train.global_batch_size", "train.microbatch_size", found.pop("accumulation", None)
    if whole in found and part not in found and ranks:
        found[part] = max(1, found[whole] // ((turns or 1) * ranks))
    elif part in found and whole not in found and ranks:
        found[whole] = found[part] * (turns or 1) * ranks
    elif part in found and whole not in found:
        says = "microbatch x accumulation x ranks: give --ranks"
        _refuse(outcomes, "train_batch_size", None, says)
    if whole in found and part in found:
        rest = found[whole] % max(1, found[part] * (turns or 1) * (ranks or 1))
        if rest or (turns and ranks and found[whole] != found[part] * turns * ranks):
            says = "it is not microbatch x accumulation x ranks"
            _refuse(outcomes, "train_batch_size", found[whole], says)


def _settle_accelerate(found: dict[str, Any], outcomes: list[Imported]) -> str:
    """Return the command that starts the ranks."""
    kind, ranks, nodes = found.pop("layout", "NO"), found.pop("--nproc-per-node", 1), found.pop("--nnodes", 1)
    found.pop("accumulation", None)
    if nodes < 1 or ranks % nodes:
        _refuse(outcomes, "num_processes", ranks, f"not the same number on each of {nodes} machines")
    flags = {"--nnodes": nodes} if nodes > 1 else {}
    for name in ("--node-rank", "--master-addr", "--master-port", "--rdzv-backend"):
        value = found.pop(name, None)
        if nodes > 1 and value is not None:
            flags[name] = value
    if flags.get("--rdzv-backend") == "c10d":
        address, port = flags.pop("--master-addr", "HOST"), flags.pop("--master-port", 29500)
        flags.pop("--node-rank", None)
        flags["--rdzv-endpoint"] = f"{address}:{port}"
    if kind == "MULTI_CPU":
        found["train.device"] = "cpu"
    if kind in ("FSDP", "DEEPSPEED"):
        found.setdefault("layout.zero", 3 if kind == "FSDP" else 2)
    zero = found.get("layout.zero")
    if isinstance(zero, str):
        found["layout.zero"] = int(zero[0])
        found["layout.dp_replicate"], found["layout.dp_shard"] = nodes, ranks // max(1, nodes)
    gpus = found.pop("CUDA_VISIBLE_DEVICES", None)
    flags["--nproc-per-node"] = ranks // max(1, nodes)
    words = [f"CUDA_VISIBLE_DEVICES={gpus}"] if gpus else []
    return " ".join(
        [*words, "paceline run", *(f"{name} {value}" for name, value in flags.items()), "train.py"]
    )


def _settle_layout(found: dict[str, Any], outcomes: list[Imported]) -> None:
    """Turn a stage of ZeRO into the words of a layout."""
    stage = found.pop("layout.zero", 3 if "layout.dp_shard" in found else 0)
    if stage:
        found.setdefault("layout.dp_shard", "auto")
        if stage != 3:
            found["layout.zero"] = stage
    elif "layout.offload" in found:
        for each in [each for each in outcomes if each.to == "layout.offload"]:
            _refuse(outcomes, each.key, each.value, "offload moves shards, and stage 0 has none")


def _list_arguments(found: dict[str, Any], layout: str) -> dict[str, Any]:
    from paceline.recipe import SETTINGS

    arguments = {"layout": layout} if layout else {}
    return arguments | {
        each.argument: found[each.key] for each in SETTINGS if each.argument and each.key in found
    }


def _read(path: Path) -> dict[str, Any]:
    from paceline.reading import read_file

    saw = "no table of keys"
    try:
        text = read_file(path, 1 << 20).decode("utf-8-sig")
        config = _parse_yaml(text) if path.suffix in _YAML else json.loads(text)
        if isinstance(config, dict) and config and all(isinstance(key, str) for key in config):
            return config
    except (OSError, ValueError, RecursionError) as error:
        saw = f"not readable as such ({' '.join(str(error).split())[:160]})"
    raise PacelineError(
        "PL741",
        saw=f"{path} is {saw}.",
        rule="DeepSpeed's configuration is a JSON object, and Accelerate's is a YAML mapping (*.yaml).",
        fix="Name the file that `deepspeed --deepspeed_config` or `accelerate launch --config_file` reads.",
    )


def _parse_yaml(text: str) -> Any:
    yaml = import_optional("yaml", "pyyaml", "It reads the YAML of Accelerate.")
    try:
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text)):
            raise ValueError("it has aliases, which may never end")
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None


def _write(path: Path, text: str) -> None:
    try:
        with path.open("x", encoding="utf-8") as stream:
            stream.write(text)
    except OSError as error:
        raise PacelineError(
            "PL742",
            saw=f"{path} cannot be written: {error.strerror}.",
            rule="The sections of a recipe go to a new file.",
            fix="Name another file: -o imported.toml",
        ) from None
