"""Joins a global batch from the ranks' microbatches, with the same bits on every rank.

Protocol, for one field, on every rank of dp: an all-gather of objects (numbers of the rank's microbatches,
shapes, dtypes), then per tensor an all-gather of bytes, padded to the longest rank's. The results are joined
in the order of microbatches, which does not depend on the rank that computed them.

A batch's fields are gathered at their first use. The loss runs in the same way on every rank, so all ranks
use the same fields in the same order. A field that the loss never uses (images) is never sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm.one_tensor import gather_objects
from paceline.errors import PacelineError
from paceline.mesh import Axis
from paceline.torch_seams.trees import TreeSpec, keystr, tree_flatten, tree_flatten_with_path, tree_unflatten

Part = tuple[int, Any]


class Whole(NamedTuple):
    """A nest of tensors for all samples of a global batch.

    Attributes:
        leaves: in the order of torch's pytrees.
        per_sample: per leaf, whether it has a row per sample; else it is shared by all samples.
    """

    leaves: list[Any]
    spec: TreeSpec
    per_sample: list[bool]

    def build(self) -> Any:
        """Build the nest from its leaves."""
        return tree_unflatten(self.leaves, self.spec)


def gather_whole(parts: Sequence[Part], counts: Sequence[int], dp: Axis | None, what: str) -> Whole:
    """Join a nest of tensors over all microbatches; collective over dp.

    A tensor with a row per sample in every microbatch is joined along the rows. Anything else must be equal
    in all microbatches.

    Args:
        parts: this rank's, as (number of the microbatch, nest).
        counts: samples of each microbatch of the global batch.
        dp: the ranks that have other microbatches, or `None` for one.
        what: name of the nest, for messages.
    """
    flat = [(number, *tree_flatten_with_path(nest)) for number, nest in parts]
    described = [
        (
            number,
            [keystr(path) for path, _ in leaves],
            [_describe(leaf) for _, leaf in leaves],
            tree_unflatten(range(len(leaves)), spec),  # send a nest of numbers in place of its spec
        )
        for number, leaves, spec in flat
    ]
    everyone = [described] if dp is None else gather_objects(described, dp.group)
    first = next(record for records in everyone for record in records)
    names, spec = first[1], tree_flatten(first[3])[1]
    for records in everyone:
        for number, others, _, _ in records:
            if others != names:
                here, there = ", ".join(others), ", ".join(names)
                raise _refuse(
                    f"{what} has the fields {here} in microbatch {number}, and {there} in the first."
                )
    numbers = [number for records in everyone for number, *_ in records]
    order = sorted(range(len(numbers)), key=numbers.__getitem__)
    leaves, per_sample = [], []
    for place, name in enumerate(names):
        own = [leaves_of[place][1] for _, leaves_of, _ in flat]
        all_described = [[record[2][place] for record in records] for records in everyone]
        gathered = _gather_leaf(own, all_described, dp)
        values = [gathered[at] for at in order]
        joined, is_per_sample = _join(values, counts, f"{what}{name}")
        leaves.append(joined)
        per_sample.append(is_per_sample)
    return Whole(leaves, spec, per_sample)


def gather_batch(
    batches: Sequence[Part], counts: Sequence[int], dp: Axis | None, place: Callable[[Any], Any]
) -> Any:
    """Return the batch of all samples; the fields of a dict or a tuple are gathered at their first use.

    Args:
        batches: this rank's microbatches by number.
        counts: samples of each microbatch of the global batch.
        dp: the ranks that have other microbatches, or `None` for one.
        place: moves a nest to the device.
    """

    def gather(what: str, pick: Callable[[Any], Any]) -> Any:
        return gather_whole([(n, place(pick(batch))) for n, batch in batches], counts, dp, what).build()

    own = _shape_of(batches[0][1]) if batches else None
    everyone = [own] if dp is None else gather_objects(own, dp.group)
    kind, keys = next(shape for shape in everyone if shape is not None)
    if kind == "mapping":
        return _Fields({key: _lazily(gather, f"batch[{key!r}]", key) for key in keys})
    if kind == "sequence":
        return _Places([_lazily(gather, f"batch[{key}]", key) for key in keys])
    return gather("batch", lambda batch: batch)


class _Fields(Mapping[Any, Any]):
    """A dict whose values are computed at their first use."""

    def __init__(self, values: dict[Any, Callable[[], Any]]) -> None:
        self._values, self._known = values, dict[Any, Any]()

    def __getitem__(self, key: Any) -> Any:
        if key not in self._known:
            self._known[key] = self._values[key]()
        return self._known[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


class _Places(Sequence[Any]):
    """A tuple whose values are computed at their first use."""

    def __init__(self, values: list[Callable[[], Any]]) -> None:
        self._fields = _Fields(dict(enumerate(values)))

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, slice):
            return tuple(self[number] for number in range(*place.indices(len(self))))
        return self._fields[range(len(self))[place]]

    def __len__(self) -> int:
        return len(self._fields)


def _lazily(gather: Callable[..., Any], what: str, key: Any) -> Callable[[], Any]:
    return lambda: gather(what, lambda batch: batch[key])


def _shape_of(batch: Any) -> tuple[str, list[Any]]:
    if isinstance(batch, Mapping):
        return "mapping", list(batch)
    if isinstance(batch, (tuple, list)):
        return "sequence", list(range(len(batch)))
    return "other", []


def _describe(leaf: Any) -> Any:
    return (leaf.shape, leaf.dtype, leaf.device.type) if isinstance(leaf, Tensor) else (None, leaf, "")


def _gather_leaf(own: list[Any], described: list[list[Any]], dp: Axis | None) -> list[Any]:
    """Return one leaf of every microbatch, rank after rank."""
    if dp is None:
        return own
    flat = [leaf for records in described for leaf in records]
    if any(shape is None for shape, _, _ in flat):
        return [value if shape is None else None for shape, value, _ in flat]
    sizes = [sum(shape.numel() * dtype.itemsize for shape, dtype, _ in records) for records in described]
    # One for all ranks, also those without a leaf; NCCL sends from the device alone.
    device = torch.device("cuda" if "nccl" in dist.get_backend(dp.group) else flat[0][2])
    sent = torch.zeros(max(sizes), dtype=torch.uint8, device=device)
    start = 0
    for tensor in own:
        data = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
        sent[start : start + len(data)] = data
        start += len(data)
    received = [torch.empty_like(sent) for _ in described]
    dist.all_gather(received, sent, group=dp.group)
    found = []
    for records, data in zip(described, received, strict=True):
        start = 0
        for shape, dtype, home in records:
            stop = start + shape.numel() * dtype.itemsize
            # Copy, because a view at an unaligned byte cannot have another dtype.
            found.append(data[start:stop].clone().view(dtype).reshape(shape).to(home))
            start = stop
    return found


def _join(values: list[Any], counts: Sequence[int], what: str) -> tuple[Any, bool]:
    assert len(values) == len(counts), (len(values), counts)
    if all(isinstance(value, Tensor) for value in values):
        if all(v.dim() > 0 and len(v) == count for v, count in zip(values, counts, strict=True)):
            shapes = sorted({tuple(v.shape[1:]) for v in values})
            if len(shapes) > 1:
                raise _refuse(
                    f"{what} has rows of the shapes {', '.join(map(str, shapes))} in the microbatches of one "
                    "global batch."
                )
            return torch.cat(values), True
        if all(torch.equal(value, values[0]) for value in values):
            return values[0], False
    elif all(not isinstance(value, Tensor) and value == values[0] for value in values):
        return values[0], False
    raise _refuse(f"{what} has no row per sample, and is not the same in all microbatches.")


def _refuse(saw: str) -> PacelineError:
    return PacelineError(
        "PL415",
        saw=saw,
        rule='With loss_over="global_batch" the loss gets the outputs and fields of all samples: tensors '
        "with a row per sample, joined in order, or values that are the same in all microbatches.",
        fix="Return one row per sample from forward=, of one shape. Pad fields that the loss uses to one "
        "length.",
    )
