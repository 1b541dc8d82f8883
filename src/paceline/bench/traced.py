"""Makes `ModelCosts` of any module, from one forward on tensors without numbers.

The forward that tp's plan is found with (`parallel/tensor/trace.py`) gives every matrix product with its
shape, and the bytes of all other operations. A second one, with gradients, gives the tensors that autograd
keeps, each storage once. tp divides what the plan that `parallelize` would use divides, for each degree that
it finds a plan for. Nothing is computed, so a model of 7B parameters on the meta device takes seconds.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.multiprocessing.reductions import StorageWeakRef

from paceline.errors import PacelineError
from paceline.named import find_named
from paceline.parallel.blocks import find_blocks
from paceline.parallel.experts.mixtures import count_experts
from paceline.parallel.tensor.split_plan import SplitPlan, find_plan
from paceline.parallel.tensor.trace import Trace, TracedOp, trace_forward
from paceline.phrases import first_line
from paceline.plan.costs import By, Kept, ModelCosts, ModelPart, Product
from paceline.plan.model_state import Sizes
from paceline.plan.parameters import Parameter
from paceline.recipe import Rules
from paceline.recipe.facts import ModelFacts, RunFacts
from paceline.torch_seams.fake import FakeTensorMode
from paceline.torch_seams.trees import tree_leaves
from paceline.train.building import call_model

_PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "convolution"}
_FREE = {"view", "t", "transpose", "permute", "expand", "slice", "select", "unsqueeze", "squeeze", "detach",
         "_unsafe_view", "alias", "as_strided", "split", "reshape", "empty", "unbind", "chunk"}  # fmt: skip
# Operations whose backward needs what they returned.
_KEEP_RESULTS = {"_softmax", "relu", "tanh", "sigmoid"}
_MOST_TP = 8


def plan_module(target: str, batch: str, global_batch: int, num_ranks: int) -> tuple[ModelCosts, Rules]:
    """Return the costs and the rules of a model that a function builds.

    Args:
        target: `module:function` that builds the model.
        batch: `module:function` that makes one microbatch, as the model is called with it.
        global_batch: samples per step; 0: one microbatch per rank.
        num_ranks: of the cluster.

    Raises:
        PacelineError: PL934 for functions that are not there or fail and for a model without a trained
            parameter, PL938 for a forward that needs numbers, PL939 for a batch without samples to count.
    """
    try:
        model, example = _call_function(target, "meta"), _call_function(batch, "cpu")
    except SystemExit as error:
        raise _refuse_function(f"{target} or {batch}", f"it calls sys.exit({error.code!r})") from error
    if not isinstance(model, nn.Module):
        raise _refuse_function(target, f"it returned {type(model).__name__}, not an nn.Module")
    samples = _count_samples(example, batch)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise PacelineError(
            "PL934",
            saw=f"{target} builds a {type(model).__name__} without a parameter that requires a gradient.",
            rule="A plan is of training, and an optimizer step changes at least one parameter.",
            fix="Set requires_grad of what you train, inside the function.",
        )
    return trace_costs(model.train(), example, samples, global_batch or samples * num_ranks)


def _call_function(target: str, device: str) -> Any:
    try:
        function = find_named(target)
    except LookupError as error:
        raise _refuse_function(target, str(error).removesuffix(".")) from error
    try:
        with torch.device(device):
            return function()
    except PacelineError:
        raise
    except Exception as error:
        raise _refuse_function(target, f"it failed ({type(error).__name__}: {first_line(error)})") from error


def _refuse_function(target: str, what: str) -> PacelineError:
    return PacelineError(
        "PL934",
        saw=f"{target}: {what}.",
        rule="A plan of a model of your own needs a function without arguments that builds it, and one that "
        "makes a microbatch.",
        fix="Give both as module:function; modules of the working folder are found.",
    )


def _count_samples(example: Any, batch: str) -> int:
    sizes = {leaf.shape[0] for leaf in tree_leaves(example) if isinstance(leaf, Tensor) and leaf.dim()}
    if len(sizes) != 1 or 0 in sizes:
        raise PacelineError(
            "PL939",
            saw=f"{batch} returned tensors with first dimensions {sorted(sizes)}.",
            rule="The first dimension of all tensors of a microbatch is its samples.",
            fix="Return the batch as the training loop passes it to the model.",
        )
    return int(sizes.pop())


def trace_costs(model: nn.Module, example: Any, samples: int, global_batch: int) -> tuple[ModelCosts, Rules]:
    """Return the costs and the rules of a model, called on an example of so many samples."""
    run = partial(call_model, batch=example)
    try:
        trace = trace_forward(model, run)
        kept = _record_kept(model, run)
    except (PacelineError, SystemExit) as error:
        raise PacelineError(
            "PL938",
            saw="The forward calls sys.exit." if isinstance(error, SystemExit) else error.saw,
            rule="A plan runs the batch through the model on tensors without numbers. A forward that "
            "looks at values (.item(), if x.any(), nonzero) has no plan, nor has a batch that does not fit.",
            fix="Pass a batch that fits, and with which the model does not look (no padding, no mask), or "
            "move the look out of the forward.",
        ) from error
    plans = _find_plans(model, run)
    blocks = [name for name, _ in find_blocks(model) if name]
    reader = _Reader(model, trace, kept, blocks, plans.get(2), samples)
    parts = reader.read()
    widths: Counter[int] = Counter()
    for p in model.parameters():
        widths[p.element_size()] += p.numel()
    width = max(widths, key=lambda size: widths[size]) if widths else 4
    tokens = reader.tokens
    costs = ModelCosts(
        name=type(model).__name__,
        before=parts[0],
        blocks=parts[1:-1] if len(parts) > 2 else (ModelPart(),),
        after=parts[-1],
        loss_bytes=reader.count_loss(),
        sizes=Sizes(parameter=width, gathered=width),
        dtype_bytes=width,
        global_batch=global_batch,
        microbatch=samples,
        tokens=tokens,
        is_transformer=reader.heads is not None,
    )
    facts = ModelFacts(
        splits=bool(plans),
        heads=math.gcd(reader.heads or 0, max(plans, default=1)),
        seq_len=tokens,
        max_rows=max((p.shape[0] for p in model.parameters() if p.dim()), default=None),
        num_blocks=len(blocks),
        num_cuts=len(blocks),
        num_experts=count_experts(model),
    )
    run_facts = RunFacts(
        dtype={2: "bf16", 8: "fp64"}.get(width, "fp32"),
        reduction="fast",
        num_microbatches=-(-global_batch // samples),
    )
    return costs, Rules(facts, run_facts)


def _find_plans(model: nn.Module, run: Callable[[nn.Module], Any]) -> dict[int, SplitPlan]:
    """Return tp's plan for each degree that has one, up to the ranks of a usual node."""
    found = {}
    degree = 2
    while degree <= _MOST_TP:
        try:
            found[degree] = find_plan(model, run, degree)
        except PacelineError:
            break
        degree *= 2
    return found


def _record_kept(model: nn.Module, run: Callable[[nn.Module], Any]) -> dict[str, list[tuple[int, int]]]:
    """Return bytes and last dimension of what autograd keeps, by the block in whose forward it is saved."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    found: dict[str, list[tuple[int, int]]] = defaultdict(list)
    where = [""]
    with ExitStack() as stack:
        fakes: dict[str, Tensor] = {}
        twins: dict[int, Tensor] = {}
        stack.enter_context(mode)
        for name, tensor in [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]:
            if id(tensor) not in twins:
                twin = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
                twins[id(tensor)] = twin.requires_grad_(tensor.requires_grad)
            fakes[name] = twins[id(tensor)]
        seen = {_identify(twin) for twin in twins.values()}
        alive: list[Any] = []

        def pack(tensor: Tensor) -> None:  # a graph that holds its own outputs is never collected
            storage = tensor.untyped_storage()
            key = _identify(tensor)
            if key not in seen:
                seen.add(key)
                alive.append(storage)
                found[where[-1]].append((storage.nbytes(), tensor.shape[-1] if tensor.dim() else 1))

        for name, block in find_blocks(model):
            if name:
                enter = block.register_forward_pre_hook(partial(_enter, where, name))
                leave = block.register_forward_hook(partial(_leave, where, name), always_call=True)
                stack.callback(enter.remove)
                stack.callback(leave.remove)
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor))
        holder = _Holder(model, run)
        own = {f"model.{name}": fake for name, fake in fakes.items()}
        functional_call(holder, own, (), tie_weights=False)
    return found


def _identify(tensor: Tensor) -> int:
    """Return a number that tensors of one storage share while it exists."""
    return int(StorageWeakRef(tensor.untyped_storage()).cdata)  # type: ignore[no-untyped-call]


def _enter(where: list[str], name: str, *_: Any) -> None:
    where.append(name)


def _leave(where: list[str], name: str, *_: Any) -> None:
    where[:] = [*where[: where.index(name)], f"after {name}"] if name in where else where


class _Holder(nn.Module):
    """Calls a model inside of a module, so that `functional_call` replaces its parameters."""

    def __init__(self, model: nn.Module, run: Callable[[nn.Module], Any]) -> None:
        super().__init__()
        self.model, self._run = model, run

    def forward(self) -> Any:
        """Run the forward."""
        return self._run(self.model)


@dataclass
class _Sums:
    """The costs of one part, in bytes of the whole microbatch."""

    products: list[Product] = field(default_factory=list)
    moved: float = 0
    moved_whole: float = 0
    calls: int = 0
    kept: float = 0
    kept_whole: float = 0
    matrices: float = 0
    summed: float = 0
    joined: dict[int, float] = field(default_factory=dict)
    largest: float = 0  # of results that no product makes
    last: tuple[int, int] = (-1, 0)  # number of the last one of that size, and of its factors
    learned: set[int] = field(default_factory=set)  # what products keep for gradients of their weights
    keys: float = 0


class _Reader:
    """Reads a trace into parts: before the first block, each block, behind the last one."""

    def __init__(
        self,
        model: nn.Module,
        trace: Trace,
        kept: Mapping[str, list[tuple[int, int]]],
        blocks: list[str],
        plan: SplitPlan | None,
        samples: int,
    ) -> None:
        self.model, self.trace, self.kept = model, trace, kept
        self.blocks, self.plan, self.samples = blocks, plan, samples
        self.sums = {name: _Sums() for name in ("before", *blocks, "after")}
        self.heads: int | None = None
        self.tokens = 1
        self.number = 4
        self.width = self._find_width()
        self.trained = {name for name, p in model.named_parameters(remove_duplicate=False) if p.requires_grad}

    def _find_width(self) -> int:
        """Return the last dimension of what blocks hand on, which tp leaves whole."""
        for call in self.trace.calls:
            if call.module in self.blocks[:1] and call.outputs:
                shape = self.trace.shapes[call.outputs[0]]
                self.number = self.trace.dtypes[call.outputs[0]].itemsize
                if len(shape) == 3:
                    self.tokens = shape[1]
                return shape[-1]
        return 0

    def read(self) -> tuple[ModelPart, ...]:
        """Return the parts."""
        place = "before"
        sources = self._follow_views()
        for op in self.trace.ops:
            inside = self._find_block(op.module)
            if inside is not None:
                place = inside
            elif place != "before":
                place = "after"
            self._add(op, self.sums[place], sources)
        for where, saved in self.kept.items():
            name = where if where in self.sums else "before" if where == "" else "after"
            for num_bytes, last in saved:
                if last == self.width:
                    self.sums[name].kept_whole += num_bytes
                else:
                    self.sums[name].kept += num_bytes
        parameters = self._list_parameters()
        return tuple(self._build(name, sums, parameters[name]) for name, sums in self.sums.items())

    def count_loss(self) -> float:
        """Return a sample's bytes of a loss outside: logarithms and two gradients of the output."""
        shapes, dtypes = self.trace.shapes, self.trace.dtypes
        numbers = [math.prod(shapes[n]) for n in self.trace.outputs if dtypes[n].is_floating_point]
        # One number is a loss.
        return 0.0 if 1 in numbers else 3.0 * max(4, self.number) * max(numbers, default=0) / self.samples

    def _find_block(self, module: str) -> str | None:
        return next((name for name in self.blocks if f"{module}.".startswith(f"{name}.")), None)

    def _follow_views(self) -> dict[int, int]:
        """Return, by number of a tensor that is a view, the number of what it looks at."""
        found: dict[int, int] = {}
        for op in self.trace.ops:
            if op.name in _FREE and op.inputs and op.outputs:
                for number in op.outputs:
                    found[number] = found.get(op.inputs[0], op.inputs[0])
        return found

    def _add(self, op: TracedOp, sums: _Sums, sources: dict[int, int]) -> None:
        shapes = self.trace.shapes
        if op.name in _FREE or not op.outputs:
            return
        sums.calls += 1
        if op.name in _PRODUCTS:
            product, left = self._read_product(op, sources), op.inputs[-2]
            sums.products.append(product)
            if product.learns:
                sums.learned.add(sources.get(left, left))
            if product.by == "columns":
                sums.joined[sources.get(left, left)] = self._size(left)
            if product.by in ("columns", "heads"):
                sums.matrices += self._size(op.outputs[0])
            else:
                sums.summed += self._size(op.outputs[0])
            return
        if "attention" in op.name and len(op.inputs) >= 3:
            q, k, v = (shapes[number] for number in op.inputs[:3])
            self.heads = q[1] if self.heads is None else math.gcd(self.heads, q[1])
            share = 0.5 if True in op.args or op.kwargs.get("is_causal") else 1.0
            heads = float(q[1])
            sums.products += [
                Product(q[2], q[3], k[2], "heads", heads, True, share),
                Product(q[2], k[2], v[3], "heads", heads, True, share),
            ]
            sums.matrices += self._size(op.outputs[0])
            sums.keys += self._size(op.inputs[1]) + self._size(op.inputs[2])
            return
        num_bytes = sum(self._size(number) for number in (*op.inputs, *op.outputs))
        shape = shapes[op.outputs[0]]
        if shape and shape[-1] == self.width:
            sums.moved_whole += num_bytes
        else:
            sums.moved += num_bytes
        size, number = max((self._size(each), each) for each in op.outputs)
        if size >= sums.largest:
            factors = sum(self._size(given) == size for given in op.inputs)
            sums.largest, sums.last = size, (-1 if op.name in _KEEP_RESULTS else number, factors)

    def _size(self, number: int) -> float:
        return math.prod(self.trace.shapes[number]) * self.trace.dtypes[number].itemsize

    def _read_product(self, op: TracedOp, sources: dict[int, int]) -> Product:
        shapes, names = self.trace.shapes, self.trace.names
        operands = [sources.get(number, number) for number in op.inputs]
        # The first operand of addmm is the bias.
        matrices = [number for number in operands if len(shapes[number]) > 1]
        weight = next((names[number] for number in matrices if number in self.trace.parameters), None)
        learns = weight is None or weight in self.trained
        split = None if self.plan is None or weight is None else self.plan.splits.get(weight)
        if op.name == "convolution":
            out, filters = shapes[op.outputs[0]], shapes[op.inputs[1]]
            rows = math.prod(out[2:])
            return Product(rows, math.prod(filters[1:]), out[1], learns=learns)
        left, right = (shapes[number] for number in op.inputs[-2:])
        if op.name in ("bmm", "baddbmm"):
            by: By = "heads" if self.plan is not None else ""
            return Product(left[1], left[2], right[2], by, left[0] / self.samples, learns=learns)
        by = ""
        if split is not None:
            # A plain matrix is [outputs, inputs] and used transposed, Conv1D of transformers as it is.
            is_transposed = op.inputs[-1] in sources
            by = "columns" if (split.dim == 0) == is_transposed else "inner"
        return Product(left[0] / self.samples, left[1], right[1], by, learns=learns)

    def _list_parameters(self) -> dict[str, tuple[list[Parameter], Kept]]:
        """Return the trained parameters of each part, and the bytes of all others."""
        found: dict[str, tuple[list[Parameter], Kept]] = {name: ([], Kept()) for name in self.sums}
        order = [name for name, _ in self.model.named_modules()]
        first = order.index(self.blocks[0]) if self.blocks else len(order)
        for name, tensor in [*self.model.named_parameters(), *self.model.named_buffers()]:
            module = name.rpartition(".")[0]
            inside = self._find_block(module)
            place = inside or ("before" if order.index(module) < first else "after")
            own, other = found[place]
            split = None if self.plan is None else self.plan.splits.get(name)
            if name in self.trained:
                dim = None if split is None else split.dim
                own.append(Parameter(name, tuple(tensor.shape) or (1,), inside or "", dim))
            else:
                more = tensor.numel() * tensor.element_size()
                cut = more if split is not None else 0
                found[place] = (own, Kept(other.split + cut, other.whole + more - cut))
        return found

    def _build(self, name: str, sums: _Sums, parameters: tuple[list[Parameter], Kept]) -> ModelPart:
        own, frozen = parameters
        is_block = name in self.blocks
        n = self.samples
        width = float(self.tokens * self.width * self.number) if is_block else 0.0
        joined = min(sum(sums.joined.values()), sums.kept_whole)
        most = sums.kept + sums.kept_whole
        few = Kept(min(sums.matrices, most) / n, width, min(sums.summed, most) / n)
        return ModelPart(
            products=tuple(sums.products),
            moved=sums.moved / n,
            moved_whole=sums.moved_whole / n,
            calls=sums.calls,
            kept=Kept(sums.kept / n, (sums.kept_whole - joined) / n, joined / n),
            kept_selective=few,
            input_bytes=width,
            # Its gradient and those of its factors, less itself, unless somebody else keeps it.
            work_bytes=(sums.last[1] + (sums.last[0] not in sums.learned)) * sums.largest / n,
            width_bytes=width,
            key_bytes=sums.keys / n,
            num_sums=2 if is_block and self.plan is not None else 0,
            parameters=tuple(own),
            frozen=frozen,
        )
