"""Compares settings over the ranks: arguments, model, optimizer, hooks and data must be the same on each.

Settings are short texts by name. They are compared in full when a trainer is built and at its first step.
Every step's agreement carries a digest of the settings that may change. Only if digests differ are the texts
gathered again, to name the difference.

Functions are compared by their bytecode. Values that a function reads from outside (a closure, a global) are
not compared; their effect shows in the weights (`equal_copies.py`).
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import CodeType
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.comm.one_tensor import gather_objects
from paceline.data.contents import are_alike
from paceline.data.loader import Loader
from paceline.data.share import Share
from paceline.errors import PacelineError
from paceline.phrases import name_ranks
from paceline.train.agreement import Numbers

_MISSING = "missing"
_MAX_SHOWN = 4
_MAX_LETTERS = 80


_is_comparing = True


@contextmanager
def ranks_may_differ() -> Iterator[None]:
    """Allow ranks to differ inside the context, for `verify`, which finds the first difference and its cause.

    Either every rank enters it, or none.
    """
    global _is_comparing
    before, _is_comparing = _is_comparing, False
    try:
        yield
    finally:
        _is_comparing = before


def is_comparing() -> bool:
    """Return whether it is an error if ranks differ."""
    return _is_comparing


def check_same_settings(settings: Mapping[str, str], group: dist.ProcessGroup) -> None:
    """Compare settings over the ranks of a group; collective.

    Costs one gather of 16 bytes per rank if all are the same.

    Raises:
        PacelineError: PL417, on every rank, naming the settings that differ and their ranks; PL668 if only
            the data differ.
    """
    differing = list_differences(settings, group)
    if differing and all(each.startswith(("content of ", "num_samples of ")) for each in differing):
        raise different_data_error("; ".join(differing))
    if differing:
        raise _different_error(differing)


def list_differences(settings: Mapping[str, str], group: dist.ProcessGroup) -> list[str]:
    """Return the settings that differ between the ranks of a group, with the ranks; collective."""
    if not is_comparing():
        return []
    digests = gather_objects(digest_text("\n".join(f"{k}={v}" for k, v in settings.items())), group)
    if digests.count(digests[0]) == len(digests):
        return []
    gathered = gather_objects(dict(settings), group)
    names = dict.fromkeys(name for each in gathered for name in each)
    differing = []
    for name in names:
        values = [each.get(name, _MISSING) for each in gathered]
        if values.count(values[0]) < len(values):
            differing.append(f"{name} is {describe_by_rank(values)}")
    return differing or ["they are in another order"]


class StepSettings:
    """The settings that may change from step to step, compared over the ranks in each step.

    Args:
        group: the ranks, or `None` in a world of one.
        describe: returns all settings that may change, by name.

    Attributes:
        digest: of the latest step, to be sent to the other ranks.
    """

    def __init__(self, group: dist.ProcessGroup | None, describe: Callable[[], Mapping[str, str]]) -> None:
        self.digest = 0
        self._group = group
        self._describe = describe
        self._share: Share | None = None
        self._seen: tuple[Any, ...] | None = None
        self._of_seen = 0

    def begin(self, key: tuple[Any, ...], numbers: tuple[Any, ...], share: Share) -> None:
        """Take the digest of a step; collective in the first one, which compares everything.

        Args:
            key: of the settings; they are described again only if it has changed. It may differ
                between ranks.
            numbers: numbers and words of this step, which enter the digest unchanged.
            share: this step's, with digests of its samples.
        """
        if self._group is None:
            return
        if key != self._seen:
            settings = self._describe()
            if self._seen is None:
                check_same_settings(settings, self._group)
            self._seen, self._of_seen = key, digest_text(repr(settings))
        self._share = share
        self.digest = digest_text(f"{self._of_seen} {numbers} {share.compared_digests}")

    def check(self, digests: Numbers) -> None:
        """Compare the digests of all ranks; collective only if they differ.

        Args:
            digests: one row of two numbers per rank.

        Raises:
            PacelineError: PL417 or PL668, on every rank.
        """
        if self._group is not None and not (digests == digests[0]).all():
            if self._share is not None and self._share.source is not None and self._share.digests:
                check_same_samples(self._share.source, self._share, self._group)
            check_same_settings(self._describe(), self._group)


def all_ranks() -> dist.ProcessGroup:
    """Return the group of all ranks."""
    group = dist.group.WORLD
    assert group is not None
    return group


def digest_text(text: str) -> int:
    """Return a 64-bit digest of a text, the same in every process."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def describe_by_rank(values: Sequence[str]) -> str:
    """Describe values by rank as a text; the values of the fewest ranks come first."""
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    ordered = sorted(ranks.items(), key=lambda item: (len(item[1]), item[1]))
    shown = [f"{_shorten(value)} on {name_ranks(members)}" for value, members in ordered[:_MAX_SHOWN]]
    return ", ".join(shown) + (" ..." if len(ordered) > _MAX_SHOWN else "")


def describe_code(function: Any) -> str:
    """Describe a function by its name and a digest of its bytecode, and another object by its type."""
    if function is None:
        return "None"
    if isinstance(function, functools.partial):
        values = {key: value for key, value in function.keywords.items() if _plain(value) is not None}
        return f"partial {describe_code(function.func)}" + (f" with {values}" if values else "")
    function = getattr(function, "__func__", function)
    code = getattr(function, "__code__", None)
    if code is None:
        kind = function if isinstance(function, type) else type(function)
        return f"{kind.__module__}.{kind.__qualname__}"
    return f"{function.__qualname__} (code {digest_text(_describe_code(code)) % 2**32:08x})"


def describe_model(name: str, model: nn.Module) -> dict[str, str]:
    """Describe a model's parameters, buffers and modules, with the settings of torch's own modules."""
    found = {}
    for own, module in model.named_modules():
        kind = type(module)
        extra = f"({module.extra_repr()})" if kind.__module__.startswith("torch.nn.") else ""
        mode = "" if module.training else " in eval mode"
        what = f"module {own or '(the model)'} of {name}"
        found[what] = f"{kind.__module__}.{kind.__qualname__}{extra}{mode}"
    for own, parameter in model.named_parameters():
        trained = "trained" if parameter.requires_grad else "frozen"
        strides = "" if parameter.is_contiguous() else f" with strides {list(parameter.stride())}"
        found[f"parameter {own} of {name}"] = f"{trained} {list(parameter.shape)} {parameter.dtype}{strides}"
    for own, buffer in model.named_buffers():
        found[f"buffer {own} of {name}"] = f"{list(buffer.shape)} {buffer.dtype}"
    return found


def describe_optimizer(name: str, optimizer: Optimizer) -> dict[str, str]:
    """Describe an optimizer's class, and the numbers and words of its groups."""
    kind = type(optimizer)
    found = {f"optimizer of {name}": f"{kind.__module__}.{kind.__qualname__}"}
    for number, group in enumerate(optimizer.param_groups):
        found[f"number of parameters in group {number} of {name}"] = str(len(group["params"]))
        for key, value in group.items():
            plain = _plain(value)
            if key != "params" and plain is not None:
                found[f"{key} of group {number} of {name}"] = repr(plain)
    return found


def describe_data(loader: Loader) -> dict[str, str]:
    """Describe a loader's settings without its position, and its data by size and a hash of some samples."""
    position = ("epoch", "number", "samples", "by_rank")
    settings = {key: value for key, value in loader.state_dict().items() if key not in position}
    settings |= {key: getattr(loader, key) for key in ("microbatch_size", "drop_last", "epochs")}
    settings["content"] = loader.content_hash
    return {f"{key} of {loader.name}": str(value) for key, value in settings.items()}


def check_same_samples(loader: Loader, share: Share, group: dist.ProcessGroup) -> None:
    """Compare the samples of a stream that ranks have read for the same places; collective.

    Fields that differ from reading to reading, such as augmentation by a generator of the data's own, are not
    compared from then on, as long as another field shows that the samples are the same.

    Args:
        share: with digests of its samples.

    Raises:
        PacelineError: PL668, on every rank.
    """
    if not is_comparing():
        return
    gathered = gather_objects(share.digests, group)

    def differ(name: str) -> bool:
        return any(each.get(name) != gathered[0].get(name) for each in gathered)

    names = [name for name in set().union(*gathered) if name not in loader.random_fields]
    if not any(map(differ, names)):
        return
    random = set().union(*gather_objects(loader.find_random_fields(share.epoch), group))
    shown = [name for name in names if name not in random and differ(name)]
    known = {name: each for name, each in share.digests.items() if name not in random}
    if shown or are_alike(known):
        fields = ", ".join(sorted(shown or random)[:_MAX_SHOWN])
        again = "" if shown else ", and on one rank if it is read again"
        raise different_data_error(f"the samples of {loader.name} differ between ranks{again} (in {fields})")
    loader.random_fields |= random


def different_data_error(saw: str, rule: str = "") -> PacelineError:
    """Return PL668, for ranks whose data differ.

    Args:
        rule: the reason, if it is not that the loader divides the data.
    """
    return PacelineError(
        "PL668",
        saw=f"{saw}.",
        rule=rule
        or "A loader is given the whole data on every rank and draws this rank's part from them. Of data "
        "that are already divided, most would never be used.",
        fix="Give every rank the same data in the same order: without split_dataset_by_node, without files "
        "or a shuffle of the rank's own, and with random numbers from the global generators of random, numpy "
        'or torch, which the loader seeds. Or keep the division: trainer.loader(..., shard="mine").',
        on_every_rank=True,
    )


def describe_step_settings(
    tracked: Sequence[str],
    updates: Mapping[str, tuple[Optimizer, Sequence[Callable[..., Any]]]],
    loader: Loader | None,
) -> dict[str, str]:
    """Return the settings that may change between steps and must be the same on all ranks, by name.

    Args:
        tracked: names of the user's objects.
        updates: by model, its optimizer and its hooks on gradients.
        loader: of the step's batch, if it came from one.
    """
    found = {"tracked": ", ".join(tracked)}
    for name, (optimizer, hooks) in updates.items():
        found |= describe_optimizer(name, optimizer)
        found[f"on_gradients of {name}"] = ", ".join(map(describe_code, hooks))
    return found | (describe_data(loader) if loader is not None else {})


def read_hyperparameters(optimizer: Optimizer) -> tuple[Any, ...]:
    """Return the numbers and words of an optimizer's groups, to detect a change."""
    return tuple(
        _plain(value) for group in optimizer.param_groups for key, value in group.items() if key != "params"
    )


def _plain(value: Any) -> Any:
    """Return a value that can be compared without waiting for a device, else `None`."""
    if isinstance(value, (int, float, str, bool)):
        return value
    if isinstance(value, (tuple, list)):
        return tuple(_plain(each) for each in value)
    if isinstance(value, Tensor) and value.dim() == 0 and value.device.type == "cpu":
        return value.item()
    return None


def _describe_code(code: CodeType) -> str:
    constants = [_describe_constant(constant) for constant in code.co_consts]
    return f"{code.co_code.hex()} {code.co_names} {code.co_varnames} {constants}"


def _describe_constant(constant: Any) -> str:
    if isinstance(constant, CodeType):
        return _describe_code(constant)
    if isinstance(constant, frozenset):  # its order differs from process to process
        return str(sorted(map(repr, constant)))
    return repr(constant)


def _shorten(text: str) -> str:
    return text if len(text) <= _MAX_LETTERS else text[:_MAX_LETTERS] + "..."


def _different_error(differing: Sequence[str]) -> PacelineError:
    shown = "; ".join(differing[:_MAX_SHOWN])
    if len(differing) > _MAX_SHOWN:
        shown += f"; and {len(differing) - _MAX_SHOWN} more"
    return PacelineError(
        "PL417",
        saw=f"ranks have different settings: {shown}.",
        rule="Every rank trains the same model with the same settings. Only the samples differ.",
        fix="Look for an argument, an argument file, an environment variable or a line that depends on the "
        "rank or on the machine.",
        on_every_rank=True,
    )
