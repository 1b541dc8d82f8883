"""Drops elements by masks that depend only on the seed, the sample, the module and the position.

The masks do not depend on the rank, the microbatch's size, the degree of tensor parallelism, the part of the
sequence, other random draws, or whether backward recomputes a block. `masks.py` computes the masks;
`scope.py` names the draws.

torch's functions are replaced only while `Masks.drawing` is active, in the places that modules call:
`torch.nn.functional`, and below it `torch._VF`, which also serves code that imported `dropout` by name. This
covers nn.Dropout and its relatives, functional dropout, `scaled_dot_product_attention` and the dropouts
within `multi_head_attention_forward`, while the model's modules are unchanged. A function with which the user
has replaced torch's is called as before (`patch.py`). Stochastic depth draws one number per sample, by
`Tensor.bernoulli_` or `torch.rand` of a size [samples, 1, ...]; those are replaced too.

Draws that are not covered are reported: at once in `Masks.unsafe` if the model's modules reveal them, else by
`find_random` (`random_draws.py`), which watches a forward.
"""

from __future__ import annotations

import math
import re
import uuid
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function

from paceline.errors import PacelineError
from paceline.finding import Finding
from paceline.parallel.dropout.masks import Cut, SampleDim, draw_bits, draw_mask, place_samples
from paceline.parallel.dropout.patch import PatchedFunction, Patches
from paceline.parallel.dropout.rounding import apply_alpha_mask, apply_mask, repeat_heads, weigh
from paceline.parallel.dropout.scope import (
    Enter,
    Leave,
    ScopeFrame,
    bases,
    find_base,
    remember_in_checkpoints,
    scope,
    standing_at,
)
from paceline.torch_seams.dispatch import has_modes, without_modes
from paceline.torch_seams.fake import FakeTensor
from paceline.torch_seams.modules import DropoutBase, list_forward_hooks
from paceline.torch_seams.operators import ATTENTION, FUNCTIONS, find_function

__all__ = ["Cut", "Masks", "apply_dropout"]

CutNow = Cut | Callable[[], Cut]
OnDraw = Callable[[str, Tensor, Tensor], None]
# By token (see `Enter`); a copy of a laid-out model has the same one.
_laid_out: weakref.WeakValueDictionary[str, Masks] = weakref.WeakValueDictionary()
_CALL_NUMBER = re.compile(r"~\d+")
# The call number of a module above the one that drops.
_CALL_ABOVE = re.compile(r"~\d+(?=[.>])")
# The hooks' keys. torch numbers hooks consecutively. Numbers that differ between blocks would be conditions
# for compiled code.
_ENTER, _LEAVE = "paceline_enter", "paceline_leave"


class Masks:
    """The random draws of one model.

    Attributes:
        splits: by key (see `on_draw`): this rank's part of the dropped tensor, empty for all of it. Tensor
            parallelism fills it, with a key for every call (`layers.0~1/dropout#0` is a module's second). A
            call without a key is treated like those of the same module that have one.
        unsafe: draws that depend on the layout, once each.
        on_draw: called with the key, the dropped tensor and the result. In attention that tensor is the
            weights [batch, heads, queries, keys]. Not called in compiled code.
        shows_attention: whether modes for functions of torch see calls of attention as calls of `attend`,
            like those of torch's own function.
    """

    def __init__(self, token: str) -> None:
        self.splits: dict[str, list[CutNow]] = {}
        self.unsafe: list[Finding] = []
        self.on_draw: OnDraw | None = None
        self.token = token
        self.shows_attention = False
        self._active: list[tuple[int, Sequence[int]]] = []

    @contextmanager
    def drawing(self, seed: int, samples: Sequence[int]) -> Iterator[None]:
        """Draw from masks inside the context: a microbatch's forward and, for recompute, its backward.

        The model may be called several times; each call draws anew. Outside the context, the model draws as
        torch does.

        Args:
            seed: of the run, the step and its phase.
            samples: numbers in the global batch of the microbatch's samples.
        """
        self._active.append((seed, samples))
        first = scope.top is None
        bottom = ScopeFrame(None, None, 0) if first else scope.top
        base = find_base(self.token, "") if first else scope.base
        try:
            with _patches.applied(), standing_at(bottom, base):
                yield
        finally:
            self._active.pop()

    @property
    def is_drawing(self) -> bool:
        """Whether the call is inside `drawing`."""
        return bool(self._active)

    def draw(self, key: str, size: Sequence[int], p: float, device: torch.device) -> Tensor:
        """Return the mask of a tensor's kept elements: bool of `size`, on `device`. Only inside `drawing`."""
        seed, samples = self._active[-1]
        cuts = [cut if isinstance(cut, Cut) else cut() for cut in _look_up(self.splits, key)]
        place = place_samples(size, len(samples), cuts)
        if not all(cut.fits(place) for cut in cuts):
            raise _misplaced_samples_error(key, size, len(samples))
        if place.dim is None:
            self._tell(_no_samples(key, size, len(samples)))
        return draw_mask(seed, key, samples, size, p, device, place=place, cuts=cuts)

    def draw_uniform(self, key: str, size: Sequence[int], like: Tensor) -> Tensor:
        """Return numbers from 0 up to 1, one per sample, of `size`. Only inside `drawing`."""
        seed, samples = self._active[-1]
        bits = draw_bits(seed, key, samples, size, like.device, place=SampleDim(0))
        # As many as the type has digits: more would be rounded to 1.
        digits = min(24, 1 - round(math.log2(torch.finfo(like.dtype).eps)))
        return ((bits >> (32 - digits)).to(like.dtype) + 2.0 ** (digits - 1)) / 2.0**digits

    def is_per_sample(self, size: Sequence[int]) -> bool:
        """Return whether a size has one element per sample of the microbatch. Only inside `drawing`."""
        return bool(size) and size[0] == len(self._active[-1][1]) == math.prod(size)

    def _tell(self, finding: Finding) -> None:
        if finding not in self.unsafe:
            self.unsafe.append(finding)


def _look_up(values: Mapping[str, list[CutNow]], key: str) -> list[CutNow]:
    """Return the cuts for a draw; for an unknown call, those that all other calls have in common."""
    if not values or key in values:
        return values.get(key, [])
    # A later call of the model or of a block is like its other calls, else like one of the dropping module.
    for simplify in (_forget_calls_above, _forget_calls):
        name = simplify(key)
        found = [value for other, value in values.items() if simplify(other) == name]
        if any(value != found[0] for value in found[1:]):
            raise _unknown_call_error(key, name)
        if found:
            return found[0]
    return []


@lru_cache(maxsize=4096)
def _forget_calls_above(key: str) -> str:
    return _CALL_ABOVE.sub("", key).lstrip(".")


@lru_cache(maxsize=4096)
def _forget_calls(key: str) -> str:
    return _CALL_NUMBER.sub("", key).lstrip(".")


def apply_dropout(model: nn.Module) -> Masks:
    """Make a model's dropout independent of the layout; the result must live as long as it is used.

    Registers hooks on modules that may draw: those with submodules, those that are not torch's own, and
    torch's dropouts. They are pickled and copied with the model; parameters, buffers and names do not change.
    """
    remember_in_checkpoints()
    masks = Masks(uuid.uuid4().hex)
    _laid_out[masks.token] = masks
    hooked: set[str] = set()
    for name, module in model.named_modules():
        if isinstance(module, nn.RNNBase) and module.dropout and module.num_layers > 1:
            masks._tell(_inside_kernel(name, module))
        if not _may_draw(module):
            continue
        enter = Enter(masks.token, name, _find_above(name, hooked))
        hooked.add(name)
        before, after, always = list_forward_hooks(module)
        before[_ENTER], after[_LEAVE], always[_LEAVE] = enter, Leave(enter), True
    return masks


def _find_above(name: str, hooked: set[str]) -> str | None:
    """Return the nearest hooked module above `name`; all modules above were visited before it."""
    while name:
        name = name.rpartition(".")[0]
        if name in hooked:
            return name
    return None


def _may_draw(module: nn.Module) -> bool:
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        return False  # never called
    if isinstance(module, DropoutBase) or next(module.children(), None) is not None:
        return True
    return not type(module).__module__.startswith("torch.nn.modules.")


# --- replacements of torch's functions ------------------------------------------------------------------


def _find_masks() -> Masks | None:
    """Return the masks of the running model; `None` if none is drawing."""
    top = scope.top
    if top is None:
        return None
    masks = _laid_out.get(scope.base.token if top.hook is None else top.hook.token)
    return masks if masks is not None and masks.is_drawing else None


def _keep(masks: Masks, key: str, size: Sequence[int], p: float, like: Tensor) -> Tensor:
    """Return a mask made hidden from dispatch modes, so that they do not record how it was made."""
    if like.is_meta or isinstance(like, FakeTensor):
        return torch.empty(list(size), dtype=torch.bool, device=like.device)
    if has_modes():
        with without_modes():
            return masks.draw(key, size, p, like.device)
    return masks.draw(key, size, p, like.device)


@torch.library.custom_op("paceline::keep", mutates_args=())
def _keep_compiled(base: Tensor, name: str, size: list[int], p: float, like: Tensor) -> Tensor:
    """Return a mask in compiled code; the masks are looked up when it runs.

    For the compiler the operation is not random: a second run in backward returns the same.
    """
    found = bases[int(base)]
    masks = _laid_out.get(found.token)
    assert masks is not None, "compiled code that draws runs inside of Masks.drawing only"
    assert masks.is_drawing, "compiled code that draws runs inside of Masks.drawing only"
    return masks.draw(found.join(name), size, p, like.device)


@_keep_compiled.register_fake
def _(base: Tensor, name: str, size: list[int], p: float, like: Tensor) -> Tensor:
    return torch.empty(size, dtype=torch.bool, device=like.device)


def _mask(kind: str, size: Sequence[int], p: float, like: Tensor) -> tuple[Tensor, Masks | None, str]:
    """Return the next draw's mask, and the masks to notify and the draw's key; only inside `drawing`."""
    assert scope.top is not None
    return _draw(scope.top.name_draw(kind), size, p, like)


def _draw(name: str, size: Sequence[int], p: float, like: Tensor) -> tuple[Tensor, Masks | None, str]:
    """Return the mask of a named draw, and the masks to notify and the draw's key."""
    if torch.compiler.is_compiling():
        return _keep_compiled(scope.base.number, name, list(size), p, like), None, name
    masks = _find_masks()
    assert masks is not None
    key = scope.base.join(name)
    return _keep(masks, key, size, p, like), masks, key


def _is_drawn(x: Tensor) -> bool:
    """Return whether Paceline makes the draw."""
    if torch.compiler.is_compiling():
        return scope.top is not None
    return _find_masks() is not None


def _drop(x: Tensor, p: float, inplace: bool, kind: str = "dropout") -> Tensor:
    assert scope.top is not None
    # Named before a mode that follows the forward may leave the rest out: later draws keep their names.
    name = scope.top.name_draw(kind)
    if not torch.compiler.is_compiling() and has_torch_function((x,)):
        result: Tensor = handle_torch_function(_drop_named, (x,), x, p, inplace, name)
        return result
    return _drop_named(x, p, inplace, name)


def _drop_named(x: Tensor, p: float, inplace: bool, name: str) -> Tensor:
    """Drop elements by the mask of a named draw: one call of a function for modes of functions."""
    keep, masks, key = _draw(name, x.shape, p, x)
    y = apply_mask(x, keep, p, inplace)
    if masks is not None and masks.on_draw is not None:
        masks.on_draw(key, x, y)
    return y


def _replace_dropout(found: Any) -> Callable[..., Tensor] | None:
    """Replace F.dropout."""
    if not _is_of_functional(found):
        return None  # a user's function; the functions of torch that it calls are replaced below

    def dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not training or not 0 < p <= 1 or not _is_drawn(input):
            result: Tensor = found(input, p, training, inplace)
            return result
        return _drop(input, p, inplace)

    return dropout


def _attention(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Replace F.scaled_dot_product_attention."""
    given = (query, key, value)
    if not torch.compiler.is_compiling() and has_torch_function(given):
        masks = _find_masks()
        if masks is not None and masks.shows_attention:
            result: Tensor = handle_torch_function(attend, given, *given, *args, **kwargs)
            return result
    return attend(query, key, value, *args, **kwargs)


# The frame between a model's code and the modes that see its call of attention.
SHOWING = _attention.__code__


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute attention by torch's own function, or with dropout by its math path, which takes a mask."""
    if not dropout_p or dropout_p > 1 or not _is_drawn(query):
        return ATTENTION(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    device, dtype = query.device.type, query.dtype
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
        if attn_mask is not None and attn_mask.dtype != torch.bool:
            attn_mask = attn_mask.to(dtype)
    with torch.autocast(device, enabled=False):
        weights = weigh(query, key, attn_mask, is_causal, scale, enable_gqa)
        weights = _drop(weights, dropout_p, inplace=False, kind="sdpa")
        value = value.to(weights.dtype)
        return (weights @ repeat_heads(value, query, enable_gqa)).to(dtype)


# The index of `dropout_p` in its arguments.
_DROPOUT_P = 4


def _replace_attention(found: Any) -> Callable[..., Tensor]:
    """Replace F.scaled_dot_product_attention; call a user's one unchanged, with a finding if it drops."""
    if found is ATTENTION:
        return _attention

    def attention(*args: Any, **kwargs: Any) -> Tensor:
        p = args[_DROPOUT_P] if len(args) > _DROPOUT_P else kwargs.get("dropout_p", 0.0)
        masks = _find_masks() if p and not torch.compiler.is_compiling() else None
        if masks is not None and scope.top is not None:
            masks._tell(_inside_attention(scope.base.join(scope.top.find_path()), found, p))
        result: Tensor = found(*args, **kwargs)
        return result

    return attention


def _replace_bernoulli(found: Any) -> Callable[..., Tensor]:
    """Replace Tensor.bernoulli_."""
    original: Callable[..., Tensor] = found or torch.Tensor.bernoulli_

    def bernoulli_(self: Tensor, p: Any = 0.5, *, generator: Any = None) -> Tensor:
        if generator is not None or not isinstance(p, float) or not _draws_per_sample(self.shape):
            return original(self, p, generator=generator)
        assert scope.top is not None
        name = scope.top.name_draw("bernoulli")
        if has_torch_function((self,)):
            result: Tensor = handle_torch_function(_bernoulli_, (self,), self, p, name)
            return result
        return _bernoulli_(self, p, name)

    return bernoulli_


def _bernoulli_(x: Tensor, p: float, name: str) -> Tensor:
    """Fill a tensor by the mask of a named draw: one call of a function for modes of functions."""
    return x.copy_(_draw(name, x.shape, 1 - p, x)[0])


def _replace_rand(found: Any) -> Callable[..., Tensor]:
    """Replace torch.rand."""

    def rand(*size: Any, **kwargs: Any) -> Tensor:
        shape = size[0] if len(size) == 1 and isinstance(size[0], (tuple, list)) else size
        plain = kwargs.keys() <= {"dtype", "device"} and all(isinstance(each, int) for each in shape)
        result: Tensor
        if not plain or not _draws_per_sample(shape):
            result = found(*size, **kwargs)
            return result
        assert scope.top is not None
        name = scope.top.name_draw("rand")
        like = torch.empty(shape, **kwargs)
        if has_torch_function((like,)):
            result = handle_torch_function(_uniform, (like,), like, name)
        else:
            result = _uniform(like, name)
        return result

    return rand


def _uniform(like: Tensor, name: str) -> Tensor:
    """Return the numbers of a named draw: one call of a function for modes of functions."""
    masks = _find_masks()
    assert masks is not None
    if like.is_meta or isinstance(like, FakeTensor):
        return torch.empty_like(like)
    with without_modes():
        return masks.draw_uniform(scope.base.join(name), like.shape, like)


def _draws_per_sample(size: Sequence[int]) -> bool:
    masks = None if torch.compiler.is_compiling() else _find_masks()
    return masks is not None and masks.is_per_sample(size)


def _replace_low(name: str) -> Callable[[Any], Callable[..., Tensor] | None]:
    """Replace a function (input, p, training) of torch._VF."""
    original = find_function(name)
    is_feature, is_alpha, inplace = "feature" in name, "alpha" in name, name.endswith("_")
    kind = name.rstrip("_")

    def run(input: Tensor, p: float, train: bool) -> Tensor:
        # While a compiler traces a function that was imported by name, the draw has no name.
        traced = torch.compiler.is_compiling() or isinstance(input, FakeTensor)
        masks = None if traced else _find_masks()
        if masks is None or not train or not 0 < p <= 1 or not input.numel():
            return original(input, p, train)
        if not is_feature and not is_alpha:
            return _drop(input, p, inplace)
        size = input.shape[:2] if is_feature else input.shape
        keep, _, key = _mask(kind, size, p, input)
        if is_feature:
            keep = keep.view(*size, *[1] * (input.dim() - 2))
        y = apply_alpha_mask(input, keep, p, inplace) if is_alpha else apply_mask(input, keep, p, inplace)
        if masks.on_draw is not None:
            masks.on_draw(key, input, y)
        return y

    return lambda found: run if found is None or found is original else None


def _with_break(found: Any) -> Callable[..., Tensor] | None:
    """Replace F.dropout2d and the like by the original, which breaks the graph of compiled code."""
    if not _is_of_functional(found):
        return None
    run: Callable[..., Tensor] = torch.compiler.disable(  # type: ignore[no-untyped-call]
        lambda *args, **kwargs: found(*args, **kwargs)
    )
    return run


def _is_of_functional(function: Any) -> bool:
    """Return whether `torch.nn.functional` itself defines this function."""
    return getattr(function, "__globals__", None) is F.__dict__


_FEATURE = ("dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
_LOW = ("dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout")


def _list_spots() -> list[PatchedFunction]:
    """Return all replaced places. (In `torch`, functions of these names are those of torch._VF.)"""
    low = {name: _replace_low(name) for n in _LOW for name in (n, f"{n}_")}
    return [
        PatchedFunction(F, "dropout", _replace_dropout),
        PatchedFunction(F, "scaled_dot_product_attention", _replace_attention),
        *[PatchedFunction(F, name, _with_break) for name in _FEATURE],
        *[PatchedFunction(FUNCTIONS, name, make) for name, make in low.items()],
        *[PatchedFunction(torch, name, make) for name, make in low.items()],
        PatchedFunction(torch.Tensor, "bernoulli_", _replace_bernoulli),
        PatchedFunction(torch, "rand", _replace_rand),
    ]


_patches = Patches(_list_spots())


# --- findings -------------------------------------------------------------------------------------------


def _no_samples(key: str, size: Sequence[int], num_samples: int) -> Finding:
    return Finding(
        "PL451",
        where=key,
        saw=f"a tensor {list(size)} is dropped in a microbatch of {num_samples} samples.",
        rule="The elements of each sample are not known, so all samples share a mask, which changes with "
        "microbatch_size.",
        fix="Give the tensor a dimension of samples, first or second, before dropout, or set the dropout to "
        "0.",
    )


def _inside_kernel(name: str, module: nn.RNNBase) -> Finding:
    return Finding(
        "PL452",
        where=name or type(module).__name__,
        saw=f"{type(module).__name__} with dropout={module.dropout:g} between {module.num_layers} layers.",
        rule="It draws inside one kernel, from the rank's generator, so its masks depend on the microbatch.",
        fix="Stack single layers with nn.Dropout between them, or set dropout=0.",
    )


def _inside_attention(name: str, function: Any, p: float) -> Finding:
    shown = getattr(function, "__qualname__", type(function).__name__)
    return Finding(
        "PL454",
        where=name or "the model",
        saw=f"{shown}, which replaces F.scaled_dot_product_attention, is called with dropout_p={p:g}.",
        rule="It draws from the rank's generator, so its masks depend on the microbatch.",
        fix="Call it with dropout_p=0, or apply nn.Dropout to its output.",
    )


def _misplaced_samples_error(key: str, size: Sequence[int], num_samples: int) -> PacelineError:
    return PacelineError(
        "PL451",
        saw=f"{key} drops a part {list(size)} of a tensor in a microbatch of {num_samples} samples, on a "
        "layout that divides the dimension in which samples are expected.",
        rule="Masks are computed per sample. Samples are expected first, or second where the first dimension "
        "has another size, but this tensor has something else there.",
        fix="Give the tensor samples as its first dimension before dropout, set this dropout to 0, choose a "
        "microbatch_size that is no size or divisor of that dimension, or leave tp and cp out.",
    )


def _unknown_call_error(key: str, name: str) -> PacelineError:
    return PacelineError(
        "PL429",
        saw=f"a dropout is called more often than in the trial forward: {key}.",
        rule=f"The calls of {name} that the trial forward made drop different parts of their tensors on the "
        "ranks of tp, so what this one drops is not known.",
        fix="Use a separate nn.Dropout for each place that drops, or make forward= call the model as the "
        "loss does.",
    )
