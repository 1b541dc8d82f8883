"""Embedding tables and logits that are cut along the vocabulary.

A rank looks up the tokens whose rows it has and returns zeros for the others; the sum over ranks is the
embedding (Shoeybi et al. 2019, section 3). The logits stay cut: a `CutTensor` stands for the whole tensor and
becomes whole only if an operation needs that. Cross-entropy does not: it exchanges three numbers per token in
place of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from paceline.mesh import Axis
from paceline.parallel.split import Split
from paceline.parallel.tensor.differentiable import (
    all_gather,
    all_reduce,
    differentiate,
    refuse_graph,
    seen_by_modes,
)
from paceline.parallel.tensor.trace import words
from paceline.torch_seams.tensors import find_base, is_fake


def look_up(table: Tensor, ids: Tensor, padding: int | None, axis: Axis) -> Tensor:
    """Return this rank's addend of an embedding: the rows it has, zeros for all other tokens.

    Args:
        table: this rank's rows; the first one is row `rank * rows` of the whole table.
        ids: int64, of the whole vocabulary.
        padding: the row that gets no gradient, of the whole vocabulary.
        axis: tp.

    Raises:
        IndexError: for an id outside of the whole vocabulary, as torch does.
    """
    rows = table.shape[0]
    is_known = not ids.is_cuda and not is_fake(ids)
    if is_known and ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < rows * axis.size:
        raise IndexError(f"index out of range in self: ids up to {int(ids.max())}, {rows * axis.size} rows")
    own = ids - axis.rank * rows
    elsewhere = (own < 0) | (own >= rows)
    found = F.embedding(own.masked_fill(elsewhere, 0), table)
    if padding is not None:
        # As in torch, the padding row is read and gets no gradient.
        found = torch.where((ids == padding).unsqueeze(-1), found.detach(), found)
    return found.masked_fill(elsewhere.unsqueeze(-1), 0)


class CutTensor:
    """A tensor divided over the ranks of tp; it becomes whole if an operation needs all of it.

    Functions of torch accept it as a tensor. Those that leave the cut dimension alone (`flatten`, `view`,
    slices, casts) and cross-entropy work on the parts. All others work on the whole tensor, which costs one
    all-gather of it. All ranks must use it in the same way.

    Attributes:
        split: how the whole is cut.
    """

    def __init__(self, part: Tensor, split: Split, axis: Axis) -> None:
        self.part = part
        self.split = split
        self._axis = axis
        self._whole: Tensor | None = None

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # passes isinstance checks for a tensor
        return Tensor

    def whole(self) -> Tensor:
        """Return the whole tensor, the same on all ranks; collective at the first call."""
        if self._whole is None:
            self._whole = join_parts(self.part, self.split, self._axis)
        return self._whole

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self.split.whole_shape(self.part.shape))

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        return self.part.dim()

    def numel(self) -> int:
        return self.part.numel() * self._axis.size

    @property
    def dtype(self) -> torch.dtype:
        return self.part.dtype

    @property
    def device(self) -> torch.device:
        return self.part.device

    @property
    def requires_grad(self) -> bool:
        return self.part.requires_grad

    def to(self, *args: Any, **kwargs: Any) -> CutTensor:
        return self._with(self.part.to(*args, **kwargs))

    def float(self) -> CutTensor:
        return self._with(self.part.float())

    def double(self) -> CutTensor:
        return self._with(self.part.double())

    def contiguous(self) -> CutTensor:
        return self._with(self.part.contiguous())

    def detach(self) -> CutTensor:
        return self._with(self.part.detach())

    def clone(self, *args: Any, **kwargs: Any) -> CutTensor:
        return self._with(self.part.clone(*args, **kwargs))

    def is_floating_point(self) -> bool:
        return self.part.is_floating_point()

    @property
    def _base(self) -> Tensor | None:  # hooks of fully_shard and Paceline read it; it must not gather
        return find_base(self.part)

    def register_hook(self, hook: Any) -> Any:
        """Register a hook for when backward reaches the part; there fully_shard gathers for backward."""
        return self.part.register_hook(hook)  # type: ignore[no-untyped-call]

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> Any:
        """Flatten the parts if the cut dimension is the last one and not flattened, else the whole."""
        end = end_dim % self.dim()
        if self._is_last and end < self.dim() - 1:
            return self._with(self.part.flatten(start_dim, end_dim))
        return self.whole().flatten(start_dim, end_dim)

    def view(self, *shape: Any) -> Any:
        """View the parts if the last dimension keeps its size, else the whole."""
        sizes = tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], (int, torch.dtype)) else shape
        if self._is_last and sizes and sizes[-1] == self.shape[-1]:
            return self._with(self.part.reshape(*sizes[:-1], self.part.shape[-1]))
        return self.whole().view(*shape)

    def reshape(self, *shape: Any) -> Any:
        return self.view(*shape) if shape and self._is_last else self.whole().reshape(*shape)

    def __getitem__(self, index: Any) -> Any:
        given = index if isinstance(index, tuple) else (index,)
        if self._is_last and _keeps_last(given, self.dim()):
            return self._with(self.part[index])
        return self.whole()[index]

    def __len__(self) -> int:
        return self.shape[0]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.whole(), name)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        keywords = dict(kwargs or {})
        if func is F.cross_entropy and isinstance(args[0], CutTensor):
            losses = _cross_entropy(*args, **keywords)
            if losses is not None:
                return losses
        return func(*(_make_whole(x) for x in args), **{key: _make_whole(x) for key, x in keywords.items()})

    @property
    def _is_last(self) -> bool:
        return self.split.dim == self.part.dim() - 1 and self.split.outer == 1

    def _with(self, part: Tensor) -> CutTensor:
        split = Split(part.dim() - 1, 1, self.split.num_ranks) if self._is_last else self.split
        return CutTensor(part, split, self._axis)


def _forward_to_whole(name: str) -> Any:
    def method(self: CutTensor, *args: Any) -> Any:
        return getattr(self.whole(), name)(*(_make_whole(x) for x in args))

    return method


for _name in words(
    "__add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __pow__ __matmul__ "
    "__rmatmul__ __neg__ __eq__ __ne__ __lt__ __le__ __gt__ __ge__ __iter__ __abs__ __bool__ "
    "__array__"
):
    setattr(CutTensor, _name, _forward_to_whole(_name))
CutTensor.__hash__ = object.__hash__  # type: ignore[method-assign]


def _make_whole(value: Any) -> Any:
    if isinstance(value, CutTensor):
        return value.whole()
    if type(value) in (list, tuple):
        return type(value)(map(_make_whole, value))
    return value


def _keeps_last(index: tuple[Any, ...], num_dims: int) -> bool:
    if any(not isinstance(x, (int, slice)) and x is not Ellipsis for x in index):
        return False
    reaches_last = Ellipsis in index or len(index) >= num_dims
    return not reaches_last or index[-1] == slice(None)


@seen_by_modes
def join_parts(part: Tensor, split: Split, axis: Axis) -> Tensor:
    """Return the whole tensor, with which all ranks then compute the same; collective."""
    return differentiate(_join, lambda grad, split, axis: split.take(grad, axis.rank), part, split, axis)


def _join(part: Tensor, split: Split, axis: Axis) -> Tensor:
    return split.join(all_gather(part.unsqueeze(0), axis, 0).unbind(0))


def _cross_entropy(
    logits: CutTensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    """Return `F.cross_entropy` on [N, classes] cut by classes; `None` if it needs all classes."""
    plain = weight is None and size_average is None and reduce is None and label_smoothing == 0.0
    is_index = isinstance(target, Tensor) and not target.is_floating_point()
    if not (plain and is_index and logits._is_last and logits.dim() == 2):
        return None
    part = logits.part
    if torch.is_autocast_enabled(part.device.type):
        part = part.float()  # as autocast does
    losses: Tensor
    losses = _CutCrossEntropy.apply(part, target, ignore_index, logits._axis)  # type: ignore[no-untyped-call]
    if reduction == "none":
        return losses
    if reduction == "sum":
        return losses.sum()
    mean: Tensor = losses.sum() / (target != ignore_index).sum()
    return mean


class _CutCrossEntropy(torch.autograd.Function):
    """The losses [N] from parts of logits [N, classes / ranks] and targets [N]."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, target: Tensor, ignore_index: int, axis: Axis) -> Tensor:
        num_own = part.shape[1]
        highest = part.max(dim=1).values
        # The largest logit of all ranks is subtracted, so that no exponential overflows.
        if not is_fake(highest):
            dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=axis.group)
        shifted = part - highest.unsqueeze(1)
        weights = shifted.exp()
        own = target - axis.rank * num_own
        elsewhere = (own < 0) | (own >= num_own)
        own = own.masked_fill(elsewhere, 0).unsqueeze(1)
        chosen = shifted.gather(1, own).squeeze(1).masked_fill(elsewhere, 0)
        total, chosen = all_reduce(torch.stack([weights.sum(dim=1), chosen]), axis)
        ignored = target == ignore_index
        ctx.save_for_backward(weights.div_(total.unsqueeze(1)), own, elsewhere, ignored)
        losses: Tensor = (total.log() - chosen).masked_fill(ignored, 0)
        return losses

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        refuse_graph()
        probabilities, own, elsewhere, ignored = ctx.saved_tensors
        result = probabilities.clone()
        # The gradient is softmax - 1 at the target: -1 on the rank that has it, 0 on the others.
        result.scatter_add_(1, own, (elsewhere.to(result.dtype) - 1).unsqueeze(1))
        return result.mul_(grad.masked_fill(ignored, 0).unsqueeze(1)), None, None, None
