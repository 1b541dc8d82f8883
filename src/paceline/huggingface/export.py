"""Writes a checkpoint as a folder that `from_pretrained` and inference servers read, tensor by tensor."""

from __future__ import annotations

import json
import secrets
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from paceline.checkpoint import files
from paceline.checkpoint.content import StoredTensor, stream_bytes
from paceline.checkpoint.export import choose_type, exists_error, open_for_export
from paceline.checkpoint.tensors import DTYPE_NAMES, TensorInfo, stream_tensors, tensor_bytes
from paceline.errors import PacelineError, import_optional
from paceline.huggingface.folder import INDEX, ONE, Weight, check_folder
from paceline.huggingface.tensor_names import to_folder

# Files of a folder that hold weights of the model as it was; all others are copied.
_WEIGHTS = (
    ".safetensors",
    ".bin",
    ".pt",
    ".pth",
    ".ckpt",
    ".h5",
    ".msgpack",
    ".gguf",
    ".onnx",
    ".index.json",
)
_SHARD_BYTES = 5_000_000_000


def export_folder(
    checkpoint: Path,
    out: Path,
    source: Path,
    dtype: torch.dtype | None = None,
    average: str | None = None,
    shard_bytes: int = _SHARD_BYTES,
) -> int:
    """Write the model of a checkpoint as a folder of Hugging Face's form.

    The folder appears whole or not at all. Tied weights are written once, under the names and in the pieces
    of the model's own folders. It takes memory for one tensor, or for the pieces of one.

    Args:
        checkpoint: one checkpoint's folder, already found valid.
        out: the folder to write; it must not exist.
        source: a folder with the model's config.json; its tokenizer and other small files are copied.
        dtype, average: as for `export_model`.
        shard_bytes: the most bytes of weights in one file.

    Returns:
        The size of the weights in bytes.
    """
    if out.exists() or out.is_symlink():
        raise exists_error(out)
    config = _read_config(source)
    model = _build_structure(config, source)
    tensors = open_for_export(checkpoint, average)
    weights = to_folder(_choose_stored(tensors, model, dtype), model)
    shards = _cut_into_shards(weights, shard_bytes)
    tmp = out.with_name(f".{out.name}.tmp-{secrets.token_hex(4)}")
    try:
        try:
            tmp.mkdir()
            for name, names in shards.items():
                _write_shard(tmp / name, {each: weights[each] for each in names})
            num_bytes = sum(each.num_bytes for each in weights.values())
            if len(shards) > 1:
                where = {each: name for name, names in shards.items() for each in names}
                index = {"metadata": {"total_size": num_bytes}, "weight_map": dict(sorted(where.items()))}
                (tmp / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
            for path in sorted(source.iterdir()):
                if path.is_file() and not path.name.endswith(_WEIGHTS) and path.name != "config.json":
                    shutil.copyfile(path, tmp / path.name)
            # Readers make the model in this type.
            types = {each.dtype for each in weights.values() if each.dtype.is_floating_point}
            if len(types) == 1:
                config = {key: each for key, each in config.items() if key != "torch_dtype"}
                config["dtype"] = str(types.pop()).removeprefix("torch.")
            (tmp / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
            files.sync_folder(tmp)
            files.rename(tmp, out)
            files.sync_folder(out.parent)
        finally:
            shutil.rmtree(tmp, ignore_errors=True)
    except OSError as error:
        raise PacelineError(
            "PL508",
            saw=f"Writing {out} failed: {error}.",
            rule="The folder is written whole or not at all.",
            fix="Choose a place with write permission and free space.",
        ) from error
    return num_bytes


def _read_config(source: Path) -> dict[str, Any]:
    check_folder(source)
    try:
        found: Any = json.loads((source / "config.json").read_text(encoding="utf-8"))
        str(found["architectures"][0])
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise PacelineError(
            "PL737",
            saw=f"{source / 'config.json'} is missing, or names no architecture ({error}).",
            rule="The configuration says which model a folder holds.",
            fix="Name the folder that the model came from, or write one: model.config.architectures = "
            "[type(model).__name__]; model.config.save_pretrained(FOLDER).",
        ) from None
    return dict(found)


def _build_structure(config: dict[str, Any], source: Path) -> nn.Module:
    """Build the configured model on the meta device; it must be one of transformers' own."""
    transformers = import_optional("transformers", "transformers", "It says which model a folder holds.")
    name = config["architectures"][0]
    kind: Any = getattr(transformers, name, None)
    if kind is None:
        raise _other_model(
            f"{source / 'config.json'} names the architecture {name}, which transformers "
            f"{transformers.__version__} does not have."
        )
    with torch.device("meta"):
        model: nn.Module = kind(kind.config_class.from_pretrained(source))
    return model


def _choose_stored(
    tensors: Mapping[str, StoredTensor], model: nn.Module, dtype: torch.dtype | None
) -> dict[str, Weight]:
    """Return the tensors to write by the model's names, tied ones once."""
    state = model.state_dict(keep_vars=True)
    others = sorted(tensors.keys() - state.keys())
    lost = sorted(dict(model.named_parameters()).keys() - tensors.keys())
    if others or lost:
        shown = f"it has {others[0]}" if others else f"it lacks {lost[0]}"
        raise _other_model(f"the checkpoint is not of {type(model).__name__}: {shown}.")
    found: dict[str, Weight] = {}
    written = set()
    for name, own in state.items():
        tensor = tensors.get(name)
        if tensor is None or tensor.name in written:
            continue
        if tuple(own.shape) != tuple(tensor.shape):
            raise _other_model(
                f"{name} has the shape {list(tensor.shape)} in the checkpoint and {list(own.shape)} by the "
                "configuration."
            )
        written.add(tensor.name)
        kind = choose_type(tensor.dtype, dtype)
        found[name] = Weight(tensor.shape, kind, _Stored(tensor, kind))
    return found


class _Stored:
    """Reads a tensor of the checkpoint in another type, whole or in blocks."""

    def __init__(self, tensor: StoredTensor, dtype: torch.dtype) -> None:
        self._tensor, self._dtype = tensor, dtype

    def __call__(self) -> torch.Tensor:
        return self._tensor.read().to(self._dtype)

    def stream(self) -> Iterator[memoryview]:
        return stream_bytes(self._tensor, lambda block: block.to(self._dtype))


def _cut_into_shards(weights: Mapping[str, Weight], most_bytes: int) -> dict[str, list[str]]:
    """Return the names in each file; a tensor larger than a shard has one of its own."""
    shards: list[list[str]] = [[]]
    held = 0
    for name, weight in weights.items():
        if shards[-1] and held + weight.num_bytes > most_bytes:
            shards.append([])
            held = 0
        shards[-1].append(name)
        held += weight.num_bytes
    if len(shards) == 1:
        return {ONE: shards[0]}
    return {f"model-{n:05d}-of-{len(shards):05d}.safetensors": names for n, names in enumerate(shards, 1)}


def _write_shard(path: Path, weights: Mapping[str, Weight]) -> None:
    infos = {name: TensorInfo(DTYPE_NAMES[each.dtype], each.shape) for name, each in weights.items()}

    def read(name: str) -> Iterator[memoryview]:
        source = weights[name].read
        if isinstance(source, _Stored):
            yield from source.stream()
        else:
            yield tensor_bytes(source())

    stream_tensors(path, infos, {}, read)


def _other_model(saw: str) -> PacelineError:
    return PacelineError(
        "PL739",
        saw=saw,
        rule="A folder of Hugging Face's form holds one model of transformers, under its names and shapes.",
        fix="Name the folder whose config.json describes the trained model. Of another model, export one "
        "plain file: paceline checkpoint export RUN model.safetensors.",
    )
