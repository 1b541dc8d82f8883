"""Maps the tensors of a folder to the names of a model, and back, by transformers' own rules for its models.

A folder may call a tensor otherwise than the model does (`transformer.` in front or not, `gamma` for
`weight`), or hold it in pieces (one matrix per expert). transformers describes this per model as a list of
transforms. Here they run on demand, one result at a time; what they will give is found on the meta device.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from paceline.errors import PacelineError
from paceline.huggingface.folder import Weight


def is_transformers_model(model: nn.Module) -> bool:
    """Return whether a model is one of transformers, without importing it."""
    return any(each.__name__ == "PreTrainedModel" for each in type(model).__mro__)


def to_model(weights: Mapping[str, Weight], model: nn.Module) -> dict[str, Weight]:
    """Return the tensors of a folder under the names that the model has for them; others keep theirs."""
    if not is_transformers_model(model):
        return dict(weights)
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    known: dict[str, Tensor] = model.state_dict(keep_vars=True)
    transforms = get_model_conversion_mapping(model)  # type: ignore[arg-type]
    renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
    converters = [each for each in transforms if isinstance(each, WeightConverter)]

    def rename(name: str) -> tuple[str, str | None]:
        prefix: Any = model.base_model_prefix
        target, pattern = rename_source_key(name, renamings, converters, prefix, known)
        if target not in known and name in known:
            target, pattern = rename_source_key(name, [], [], prefix, known)
        return target, pattern

    return _convert(weights, rename, converters, model)


def to_folder(weights: Mapping[str, Weight], model: nn.Module) -> dict[str, Weight]:
    """Return a model's tensors under the names, and in the pieces, of a folder."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        PrefixChange,
        WeightConverter,
        WeightRenaming,
        apply_converters,
        apply_renamings,
    )

    # Prefixes are left as they are in the model, which is read again with either.
    transforms = [
        each.reverse_transform()
        for each in reversed(get_model_conversion_mapping(model, add_legacy=False))  # type: ignore[arg-type]
        if not isinstance(each, PrefixChange)
    ]
    renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
    converters = [each for each in transforms if isinstance(each, WeightConverter)]

    def rename(name: str) -> tuple[str, str | None]:
        target, pattern = apply_converters(name, converters)
        return (apply_renamings(name, renamings), None) if pattern is None else (target, pattern)

    converted = _convert(weights, rename, converters, model)
    # After a converter, which derives its results' names from its patterns.
    plain = {rename(name)[0] for name in weights if rename(name)[1] is None}
    return {
        name if name in plain else apply_renamings(name, renamings): each for name, each in converted.items()
    }


def _convert(
    weights: Mapping[str, Weight],
    rename: Callable[[str], tuple[str, str | None]],
    converters: list[Any],
    model: nn.Module,
) -> dict[str, Weight]:
    """Return tensors by their new names, those that a converter joins or cuts as its results."""
    from transformers.core_model_loading import dot_natural_key

    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    found: dict[str, Weight] = {}
    groups: dict[str, tuple[Any, list[tuple[str, str]]]] = {}
    for name in sorted(weights, key=dot_natural_key):
        target, pattern = rename(name)
        if pattern is None:
            found[target] = weights[name]
        else:
            groups.setdefault(target, (by_pattern[pattern], []))[1].append((name, pattern))
    for target, (converter, sources) in groups.items():
        found |= _Conversion(target, converter, sources, weights, model).list_results()
    return found


class _Conversion:
    """The tensors that one converter takes together; it runs when the first of its results is read."""

    def __init__(
        self,
        target: str,
        converter: Any,
        sources: list[tuple[str, str]],
        weights: Mapping[str, Weight],
        model: nn.Module,
    ) -> None:
        self._target, self._converter, self._sources = target, converter, sources
        self._weights, self._model = weights, model
        self._made: dict[str, Tensor] = {}

    def list_results(self) -> dict[str, Weight]:
        shapes = self._run(lambda each: torch.empty(each.shape, dtype=each.dtype, device="meta"))
        return {
            name: Weight(tuple(each.shape), each.dtype, lambda name=name: self._read(name))  # type: ignore[misc]
            for name, each in shapes.items()
        }

    def _read(self, name: str) -> Tensor:
        if name not in self._made:
            self._made = self._run(lambda each: each.read())
        return self._made.pop(name).contiguous()

    def _run(self, read: Callable[[Weight], Tensor]) -> dict[str, Tensor]:
        converter = copy.deepcopy(self._converter)
        for name, pattern in self._sources:
            weight = self._weights[name]
            converter.add_tensor(self._target, name, pattern, lambda weight=weight: read(weight))
        results = converter.convert(self._target, model=self._model, config=self._model.config)
        return {name: each[0] if isinstance(each, list) else each for name, each in results.items()}


def match(
    weights: Mapping[str, Weight], model: nn.Module, new: tuple[str, ...]
) -> Iterator[tuple[str, Weight]]:
    """Yield each tensor of a model's state that a folder has; raise or report the others.

    Args:
        weights: under the model's names.
        new: patterns of names that the folder need not have.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    state: dict[str, Tensor] = model.state_dict(keep_vars=True)
    tied: dict[int, list[str]] = {}
    for name, tensor in parameters.items():
        tied.setdefault(id(tensor), []).append(name)
    missing = [
        names[0]
        for names in tied.values()
        if not any(name in weights or is_listed(name, new) for name in names)
    ]
    if missing:
        raise _match_error(
            f"the folder lacks {len(missing)} of the model's {len(tied)} parameters: {', '.join(missing[:4])}"
            + (" ..." if len(missing) > 4 else ""),
            'Name those that are to start with the values of the factory: new=["score.*"].',
        )
    for name, held in state.items():
        if name not in weights or is_listed(name, new):
            continue
        if tuple(held.shape) != weights[name].shape:
            raise _match_error(
                f"{name} has the shape {list(weights[name].shape)} in the folder and {list(held.shape)} in "
                "the model",
                "Build the model from the folder's config.json (another vocabulary, another size), or name "
                f'the tensor in new=["{name}"].',
            )
        yield name, weights[name]


def list_unused(weights: Mapping[str, Weight], model: nn.Module) -> list[str]:
    """Return the tensors of a folder that the model has no place for and does not expect there."""
    ignored = tuple(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())
    known = model.state_dict(keep_vars=True).keys()
    return [
        name for name in weights if name not in known and not any(re.search(each, name) for each in ignored)
    ]


def is_listed(name: str, patterns: tuple[str, ...]) -> bool:
    """Return whether a name matches a pattern, in which `*` stands for anything."""
    return any(re.fullmatch(re.escape(each).replace(r"\*", ".*"), name) for each in patterns)


def _match_error(saw: str, fix: str) -> PacelineError:
    return PacelineError(
        "PL738",
        saw=f"{saw}.",
        rule="Every parameter of a pretrained model is read from its folder. Others would start at random.",
        fix=fix,
    )
