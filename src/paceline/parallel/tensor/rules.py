"""Derives from each operation which dimensions of its tensors belong together.

There is one function per kind of operation. An operation without a function pins all of its tensors: its
effect is not known here, so nothing that it uses is cut. That is safe, and the plan reports it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from paceline.parallel.tensor.atoms import Atom, Dim, divide, leaves, new_dim, pin, unify
from paceline.parallel.tensor.trace import Ref, Trace, TracedOp, words
from paceline.torch_seams.attention_ops import ATTENTION_OPS


@dataclass
class Dims:
    """The dimensions of all tensors of a trace.

    Attributes:
        of: by number of a tensor, its dimensions.
        products: by number of an operation, the atoms that it sums over; if they are cut, a sum over ranks
            remains.
        lookups: by number of an operation, the atoms of the rows of its lookup table.
        unknown: names of operations without a rule.
    """

    trace: Trace
    of: dict[int, list[Dim]] = field(default_factory=dict)
    products: dict[int, Dim] = field(default_factory=dict)
    lookups: dict[int, Dim] = field(default_factory=dict)
    unknown: dict[str, str] = field(default_factory=dict)

    def __getitem__(self, tensor: int | Ref) -> list[Dim]:
        number = tensor.number if isinstance(tensor, Ref) else tensor
        if number not in self.of:
            self.of[number] = [new_dim(size) for size in self.trace.shapes[number]]
        return self.of[number]

    def shape(self, tensor: int | Ref) -> tuple[int, ...]:
        return self.trace.shapes[tensor.number if isinstance(tensor, Ref) else tensor]


def read_dims(trace: Trace) -> Dims:
    """Apply the rules to all operations of a trace, in order."""
    dims = Dims(trace)
    for number, op in enumerate(trace.ops):
        if op.is_outside or (not op.inputs and not op.outputs):
            continue  # what the model returns is whole outside of it
        rule = _RULES.get(op.name)
        if rule is not None:
            rule(dims, number, op)
        elif op.outputs:
            dims.unknown.setdefault(op.name, op.module)
            for tensor in {*op.inputs, *op.outputs}:
                for dim in dims[tensor]:
                    pin(dim, f"{op.name} in {op.module or 'the model'} has no rule in the planner")
    return dims


Rule = Callable[[Dims, int, TracedOp], None]


def _why(op: TracedOp) -> str:
    return f"{op.name} in {op.module or 'the model'} needs all of it"


def _pointwise(dims: Dims, number: int, op: TracedOp) -> None:
    """Broadcast every input to every output."""
    for output in op.outputs:
        for tensor in op.inputs:
            _align(dims, tensor, output, op)


def _align(dims: Dims, tensor: int, output: int, op: TracedOp, skip: Sequence[int] = ()) -> None:
    """Unify dimensions of equal size, from the last one on; `skip` holds indices of the output."""
    mine, its = dims.shape(tensor), dims.shape(output)
    for back in range(1, min(len(mine), len(its)) + 1):
        if mine[-back] == its[-back] > 1 and len(its) - back not in skip:
            unify(dims[tensor][-back], dims[output][-back], _why(op))


def _create(dims: Dims, number: int, op: TracedOp) -> None:
    """Create new dimensions for a tensor made from numbers."""
    for output in op.outputs:
        dims[output]


def _view(dims: Dims, number: int, op: TracedOp) -> None:
    """Unify the dimensions of the same elements, in the same order, in another shape."""
    (source, *_), (output,) = op.inputs, op.outputs
    if math.prod(dims.shape(source)) != math.prod(dims.shape(output)):
        _unknown_shape(dims, op)
        return
    if math.prod(dims.shape(source)) > 1:
        reason = (
            f"a view in {op.module or 'the model'} turns {_show(dims, source)} into {_show(dims, output)}"
        )
        unify([a for dim in dims[source] for a in dim], [a for dim in dims[output] for a in dim], reason)


def _show(dims: Dims, tensor: int) -> str:
    return "x".join(map(str, dims.shape(tensor)))


def _unknown_shape(dims: Dims, op: TracedOp) -> None:
    for tensor in {*op.inputs, *op.outputs}:
        for dim in dims[tensor]:
            pin(dim, _why(op))


def _permuted(dims: Dims, op: TracedOp, order: Sequence[int]) -> None:
    source, output = op.inputs[0], op.outputs[0]
    rank = len(dims.shape(source))
    dims.of[output] = [dims[source][place % rank] for place in order]


def _transpose(dims: Dims, number: int, op: TracedOp) -> None:
    order = list(range(len(dims.shape(op.inputs[0]))))
    first, second = op.args[1], op.args[2]
    order[first], order[second] = order[second], order[first]
    _permuted(dims, op, order)


def _t(dims: Dims, number: int, op: TracedOp) -> None:
    _permuted(dims, op, list(reversed(range(len(dims.shape(op.inputs[0]))))))


def _permute(dims: Dims, number: int, op: TracedOp) -> None:
    _permuted(dims, op, op.args[1])


def _squeeze(dims: Dims, number: int, op: TracedOp) -> None:
    """Handle squeeze and unsqueeze: only dimensions of size 1 change."""
    source, output = op.inputs[0], op.outputs[0]
    kept = iter([dim for dim, size in zip(dims[source], dims.shape(source), strict=True) if size != 1])
    dims.of[output] = [() if size == 1 else next(kept) for size in dims.shape(output)]


def _expand(dims: Dims, number: int, op: TracedOp) -> None:
    """Handle expand: a dimension of size 1 becomes a new one, the same in all copies."""
    _align(dims, op.inputs[0], op.outputs[0], op)


def _select(dims: Dims, number: int, op: TracedOp) -> None:
    source, output = op.inputs[0], op.outputs[0]
    place = op.args[1] % len(dims.shape(source))
    pin(dims[source][place], _why(op))
    dims.of[output] = [dim for at, dim in enumerate(dims[source]) if at != place]


def _runs(dims: Dims, op: TracedOp, place: int) -> None:
    """Treat each output as one of several equal runs of a dimension; otherwise pin the dimension."""
    source = op.inputs[0]
    place %= len(dims.shape(source))
    whole = dims.shape(source)[place]
    for output in op.outputs:
        size = dims.shape(output)[place]
        run: Dim
        if size == whole:
            run = dims[source][place]
        elif size and whole % size == 0:
            run = divide(dims[source][place], whole // size, _why(op))
        else:
            pin(dims[source][place], _why(op))
            run = new_dim(size)
            pin(run, _why(op))
        dims.of[output] = [run if at == place else dim for at, dim in enumerate(dims[source])]


def _split(dims: Dims, number: int, op: TracedOp) -> None:
    _runs(dims, op, op.args[2] if len(op.args) > 2 else op.kwargs.get("dim", 0))


def _slice(dims: Dims, number: int, op: TracedOp) -> None:
    place = op.args[1] if len(op.args) > 1 else 0
    start = op.args[2] if len(op.args) > 2 and op.args[2] is not None else 0
    size, step = dims.shape(op.outputs[0])[place], op.args[4] if len(op.args) > 4 else 1
    whole = dims.shape(op.inputs[0])[place]
    aligned = step == 1 and size and (start % whole) % size == 0
    if not aligned:
        pin(dims[op.inputs[0]][place], _why(op))
        fresh = new_dim(size)
        pin(fresh, _why(op))
        dims.of[op.outputs[0]] = [
            fresh if at == place % len(dims[op.inputs[0]]) else dim
            for at, dim in enumerate(dims[op.inputs[0]])
        ]
        return
    _runs(dims, op, place)


def _cat(dims: Dims, number: int, op: TracedOp) -> None:
    output = op.outputs[0]
    place = (op.args[1] if len(op.args) > 1 else 0) % len(dims.shape(output))
    tensors = [leaf.number for leaf in op.args[0] if dims.shape(leaf) != (0,)]
    sizes = {dims.shape(tensor)[place] for tensor in tensors}
    for tensor in tensors:
        _align(dims, tensor, output, op, skip=(place,))
    if len(tensors) == 1:
        unify(dims[tensors[0]][place], dims[output][place], _why(op))
    elif len(sizes) == 1:
        run = divide(dims[output][place], len(tensors), _why(op))
        for tensor in tensors:
            unify(dims[tensor][place], run, _why(op))
    else:
        for dim in (dims[output][place], *(dims[tensor][place] for tensor in tensors)):
            pin(dim, _why(op))


def _stack(dims: Dims, number: int, op: TracedOp) -> None:
    output = op.outputs[0]
    place = (op.args[1] if len(op.args) > 1 else 0) % len(dims.shape(output))
    rest = [dim for at, dim in enumerate(dims[output]) if at != place]
    for leaf in op.args[0]:
        for mine, its in zip(dims[leaf], rest, strict=True):
            unify(mine, its, _why(op))
    pin(dims[output][place], _why(op))


def _along(dims: Dims, number: int, op: TracedOp) -> None:
    """Pin the named dimensions, which are needed whole (softmax, mean, sum, argmax); unify the others."""
    source = op.inputs[0]
    shape = dims.shape(source)
    given = op.args[1] if len(op.args) > 1 else op.kwargs.get("dim")
    places = (
        range(len(shape)) if given is None or given == [] else [given] if isinstance(given, int) else given
    )
    along = {place % len(shape) for place in places} if shape else set()
    for place in along:
        pin(dims[source][place], _why(op))
    kept = [dim for at, dim in enumerate(dims[source]) if at not in along]
    for output in op.outputs:
        if len(dims.shape(output)) == len(shape):
            _align(dims, source, output, op, skip=[at for at in along if dims.shape(output)[at] != shape[at]])
        elif len(dims.shape(output)) == len(kept):
            dims.of[output] = list(kept)
        else:
            _unknown_shape(dims, op)


def _mm(dims: Dims, number: int, op: TracedOp) -> None:
    """Handle mm, bmm, addmm, baddbmm: [.., m, k] x [.., k, n] -> [.., m, n]; sums over k."""
    left, right = op.inputs[-2:]
    output = op.outputs[0]
    unify(dims[left][-1], dims[right][-2], _why(op))
    unify(dims[left][-2], dims[output][-2], _why(op))
    unify(dims[right][-1], dims[output][-1], _why(op))
    if len(dims.shape(output)) == 3:
        for tensor in (left, right):
            unify(dims[tensor][0], dims[output][0], _why(op))
    if len(op.inputs) == 3:
        _align(dims, op.inputs[0], output, op)
    dims.products[number] = dims[left][-1]


def _attention(dims: Dims, number: int, op: TracedOp) -> None:
    """Handle fused attention: queries [B, H, S, d], keys, values [B, G, T, d]; H is a multiple of G."""
    query, key, value = (leaf.number for leaf in op.args[:3])
    output = op.outputs[0]
    reason = _why(op)
    for tensor in (key, value):
        unify(dims[query][0], dims[tensor][0], reason)
        shared = dims.shape(query)[1] // dims.shape(tensor)[1]
        unify(dims[query][1], (*dims[tensor][1], *new_dim(shared)), reason)
    unify(dims[key][2], dims[value][2], reason)
    unify(dims[query][3], dims[key][3], reason)
    for dim in (dims[key][2], dims[query][3]):
        pin(dim, reason)
    dims.of[output] = [*dims[query][:3], dims[value][3]]
    for extra in op.outputs[1:]:
        if len(dims.shape(extra)) >= 2 and dims.shape(extra)[:2] == dims.shape(query)[:2]:
            for place in (0, 1):
                unify(dims[extra][place], dims[query][place], reason)
    for tensor in op.inputs[3:]:  # a mask [B or 1, H or 1, S, T]
        scores = [dims[query][0], dims[query][1], dims[query][2], dims[key][2]]
        shape = [dims.shape(query)[0], dims.shape(query)[1], dims.shape(query)[2], dims.shape(key)[2]]
        for back in range(1, min(4, len(dims.shape(tensor))) + 1):
            if dims.shape(tensor)[-back] == shape[-back] > 1:
                unify(dims[tensor][-back], scores[-back], reason)


def _embedding(dims: Dims, number: int, op: TracedOp) -> None:
    table, places = op.inputs[:2]
    dims.lookups[number] = dims[table][0]
    dims.of[op.outputs[0]] = [*dims[places], dims[table][1]]


def _layer_norm(dims: Dims, number: int, op: TracedOp) -> None:
    """Handle native_layer_norm, rms_norm: over the last dimensions, with weights of their shape."""
    source, *weights = op.inputs
    normed = len(op.args[1])
    for place in range(1, normed + 1):
        pin(dims[source][-place], _why(op))
    for weight in weights:
        _align(dims, weight, source, op)
    for output in op.outputs:
        _align(dims, source, output, op)


def _convolution(dims: Dims, number: int, op: TracedOp) -> None:
    """Pin the channels; unify the samples."""
    source, weight, *bias = op.inputs
    output = op.outputs[0]
    unify(dims[source][0], dims[output][0], _why(op))
    pin([a for dim in (*dims[source][1:], *dims[weight], *dims[output][1:]) for a in dim], _why(op))
    for tensor in bias:
        pin([a for dim in dims[tensor] for a in dim], _why(op))


def _batch_norm(dims: Dims, number: int, op: TracedOp) -> None:
    source = op.inputs[0]
    _align(dims, source, op.outputs[0], op)
    for tensor in (source, *op.inputs[1:], *op.outputs[1:]):
        for dim in dims[tensor]:
            pin(dim, _why(op))


POINTWISE = words(
    "add add_ sub sub_ rsub mul mul_ div div_ neg neg_ pow reciprocal sqrt rsqrt exp exp_ log log1p "
    "sin cos tanh sigmoid silu silu_ gelu gelu_ relu relu_ leaky_relu elu selu mish hardtanh softplus "
    "hardswish hardsigmoid abs sign erf square clamp clamp_ clamp_min clamp_max where masked_fill "
    "masked_fill_ maximum minimum addcmul addcdiv lerp native_dropout bernoulli bernoulli_ dropout "
    "rand_like randn_like clone contiguous detach alias to _to_copy copy copy_ lift_fresh "
    "lift_fresh_copy zeros_like ones_like empty_like full_like fill fill_ zero_ eq ne lt le gt ge "
    "logical_not logical_and logical_or logical_xor bitwise_and bitwise_or bitwise_not bitwise_xor "
    "__and__ __or__ isnan isinf isfinite floor ceil round trunc remainder floor_divide fmod "
    "nan_to_num logit log_sigmoid_forward _conj view_as_real_copy tril triu resolve_conj resolve_neg "
    "type_as is_same_size nan_to_num_ polar complex real imag"
)

_RULES: dict[str, Rule] = {
    **dict.fromkeys(POINTWISE, _pointwise),
    **dict.fromkeys(
        words(
            "arange zeros ones full empty scalar_tensor rand randn randint linspace eye empty_strided "
            "new_zeros new_ones new_full new_empty device size sym_size stride numel is_contiguous"
        ),
        _create,
    ),
    **dict.fromkeys(["view", "_unsafe_view", "reshape", "_reshape_alias", "flatten", "unflatten"], _view),
    **dict.fromkeys(words("squeeze unsqueeze"), _squeeze),
    **dict.fromkeys(["split", "chunk", "split_with_sizes"], _split),
    **dict.fromkeys(
        words(
            "_softmax _log_softmax _safe_softmax softmax log_softmax mean sum amax amin var std "
            "argmax argmin logsumexp cumsum cumprod all any var_mean max min prod"
        ),
        _along,
    ),
    **dict.fromkeys(["mm", "bmm", "addmm", "baddbmm"], _mm),
    **dict.fromkeys(["native_layer_norm", "_fused_rms_norm", "rms_norm"], _layer_norm),
    **dict.fromkeys(ATTENTION_OPS, _attention),
    **dict.fromkeys(["convolution", "_convolution"], _convolution),
    **dict.fromkeys(["native_batch_norm", "_native_batch_norm_legit", "cudnn_batch_norm"], _batch_norm),
    "transpose": _transpose,
    "t": _t,
    "permute": _permute,
    "expand": _expand,
    "select": _select,
    "slice": _slice,
    "cat": _cat,
    "stack": _stack,
    "embedding": _embedding,
}


def keeps_apart(trace: Trace, op: TracedOp, tensor: int, place: int, outer: int, size: int) -> bool:
    """Return whether an operation treats every position of a dimension by itself.

    Args:
        tensor: number of one of its inputs.
        place: the dimension of that input in which the positions are.
        outer: product of the sizes outside of the positions in that dimension.
        size: number of positions.
    """
    rule = _RULES.get(op.name)
    if rule is None:
        return False
    dims = Dims(trace)  # new ones, so that only this operation has an effect
    positions = new_dim(size)
    inner = trace.shapes[tensor][place] // (outer * size)
    dims[tensor][place] = (*new_dim(outer), *positions, *new_dim(inner))
    rule(dims, 0, op)
    found = leaves(positions)
    if any(atom.pinned for atom in found) or set(found) & set(leaves(dims.products.get(0, ()))):
        return False
    return all(set(found) <= {a for dim in dims[output] for a in leaves(dim)} for output in op.outputs)


def atoms_of(dims: Dims, tensor: int) -> list[tuple[int, int, Atom]]:
    """Return all atoms of a tensor as (dimension, product of the sizes outside of it there, atom)."""
    found = []
    for place, dim in enumerate(dims[tensor]):
        outer = 1
        for atom in leaves(dim):
            found.append((place, outer, atom))
            outer *= atom.size
    return found
