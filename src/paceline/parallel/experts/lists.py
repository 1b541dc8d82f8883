"""Experts in a list: equal modules, which the forward of the module around them calls in a loop.

The loop is the user's code, as it is (`loop.py`). An input of an expert has any shape whose last dimension is
the width, and travels with it. So an expert computes what it would compute in one process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call

from paceline.errors import PacelineError
from paceline.parallel.experts.forms import ExpertForm
from paceline.parallel.experts.loop import ExpertLoop, TrialLoop, like, loop_error
from paceline.parallel.split import Split, WholeOn
from paceline.torch_seams.dispatch import with_functions, without_functions
from paceline.torch_seams.modules import DropoutBase, copy_tree, list_hooks
from paceline.torch_seams.tensors import is_fake
from paceline.torch_seams.trees import tree_leaves

# From inputs, by the numbers of the called experts, to their answers.
AnswerCalls = Callable[[Mapping[int, Tensor]], Mapping[int, Tensor]]
# An input has at most as many dimensions.
MAX_DIMS = 4


class ListForm(ExpertForm):
    """Experts that are modules of their own, in a list.

    A rank of ep holds whole experts; those of other ranks are modules with empty parameters.

    Args:
        module: the one whose forward calls the experts.
        key: of the list in the module; empty if it is the list.
        name: of the module, for messages.

    Attributes:
        name: as given.
        numbers: of the experts that this rank holds.
        answer_kind: width and type of the answers to the latest calls; `None` before the first.
    """

    def __init__(self, module: nn.Module, key: str, name: str) -> None:
        super().__init__(module)
        self.name = name
        prefix = f"{key}." if key else ""
        children = dict(module.get_submodule(key).named_children())
        self._experts = list(children.values())
        self._children = [f"{prefix}{child}" for child in children]
        # The parameters of each expert, by their names in it.
        self._own_keys = [[own for own, _ in expert.named_parameters()] for expert in self._experts]
        self.keys = tuple(
            f"{prefix}{child}.{own}"
            for child, own_keys in zip(children, self._own_keys, strict=True)
            for own in own_keys
        )
        self.numbers = range(len(self._experts))
        self._twins: list[nn.Module] = []
        self._forwards: list[Callable[..., Any]] = []
        self._loop: ExpertLoop | None = None
        self.answer_kind: tuple[int, torch.dtype] | None = None
        self._answer_kinds: dict[Any, tuple[int, torch.dtype]] = {}

    @property
    def num_experts(self) -> int:
        return len(self._experts)

    def divide(self, degree: int) -> dict[str, Split]:
        each = self.num_experts // degree
        owners = [number // each for number, keys in enumerate(self._own_keys) for _ in keys]
        sizes = [len(weight) for weight in self.list_weights()]
        return {
            key: WholeOn(0, 1, degree, "ep", owner, size)
            for key, owner, size in zip(self.keys, owners, sizes, strict=True)
        }

    def choose(self, rank: int, degree: int) -> None:
        """Note which experts a rank of ep holds: `numbers`."""
        each = self.num_experts // degree
        self.numbers = range(rank * each, (rank + 1) * each)

    def list_names(self) -> list[str]:
        """Return the full names of the experts."""
        return list(dict.fromkeys(join_names(self.name, child) for child in self._children))

    def list_held(self) -> list[nn.Parameter]:
        """Return the parameters of the experts that this rank holds."""
        return [weight for number in self.numbers for weight in self._experts[number].parameters()]

    def make_forward(self, answer: AnswerCalls) -> Callable[..., Any]:
        """Return a forward for the module; experts can be called inside of it alone from here on.

        Args:
            answer: computes the answers.
        """
        forward = self.module.forward
        for name, expert in zip(self._children, self._experts, strict=True):
            _refuse_hooks(join_names(self.name, name), expert)
        # Their hooks run where an expert is called, and stages of pp follow the calls there.
        self._twins = [copy_tree(expert) for expert in self._experts]
        for number, expert in enumerate(self._experts):
            self._forwards.append(expert.forward)
            expert.forward = MethodType(partial(_call_expert, self, number), expert)

        def run(_: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if _is_trial(args, kwargs):
                return forward(*args, **kwargs)
            self._loop = ExpertLoop(self.name, self._stand_in)
            try:
                with with_functions(), self._loop:  # a stage of pp hides functions inside of its blocks
                    output = forward(*args, **kwargs)
                loop = self._loop
                loop.check()
            finally:
                self._loop = None
            with without_functions():
                return loop.finish(answer(loop.calls), output)

        return run

    def call(self, number: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return the answer of an expert, or a stand-in for it."""
        if self._loop is not None:
            return self._loop.call(number, args, kwargs)
        if _is_trial(args, kwargs):
            # All experts have equal shapes, and another rank's are empty here. The trial shows that this
            # expert's parameters are used.
            answer = self._forwards[self.numbers[0]](*args, **kwargs)
            return sum((weight.sum() for weight in self._experts[number].parameters()), answer)
        raise loop_error(self.name, f"expert {number} is called outside of its forward.")

    def compute(self, number: int, rows: Tensor, weights: Sequence[Tensor] | None = None) -> Tensor:
        """Return the answer of an expert of this rank.

        Args:
            number: of the expert.
            rows: its input.
            weights: in place of its parameters, in their order.

        Raises:
            PacelineError: PL662 unless the answer is a tensor like the input, up to the last dimension.
        """
        given = self._experts[number].parameters() if weights is None else weights
        named = dict(zip(self._own_keys[number], given, strict=True))
        answer = functional_call(self._twins[number], cast(Any, named), (rows,))
        if not isinstance(answer, Tensor) or answer.shape[:-1] != rows.shape[:-1]:
            shape = tuple(answer.shape) if isinstance(answer, Tensor) else type(answer).__name__
            raise loop_error(self.name, f"expert {number} returns {shape} for an input {tuple(rows.shape)}.")
        return answer

    def list_weights_of(self, number: int) -> list[nn.Parameter]:
        """Return the parameters of one expert."""
        return list(self._experts[number].parameters())

    def _stand_in(self, fake: Any, given: Tensor) -> Tensor:
        """Return a tensor like the answer of an expert, without numbers."""
        kind = given.device.type
        autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        state = (given.dtype, given.shape[-1], given.dim(), autocast)
        with fake, torch.no_grad():
            if state not in self._answer_kinds:
                first = self.numbers[0]
                weights = [like(weight) for weight in self.list_weights_of(first)]
                answer = self.compute(first, like(given), weights)
                self._answer_kinds[state] = answer.shape[-1], answer.dtype
            width, dtype = self.answer_kind = self._answer_kinds[state]
            return torch.empty(*given.shape[:-1], width, dtype=dtype, device=given.device)


def join_names(*names: str) -> str:
    """Return a full name, from those of a module and of what is in it."""
    return ".".join(name for name in names if name)


def open_trials(form: ListForm) -> None:
    """Make trial forwards run the loop of a mixture, in place."""
    forward = form.module.forward

    def run(_: nn.Module, *args: Any, **kwargs: Any) -> Any:
        fakes = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and is_fake(leaf)]
        if not fakes:
            return forward(*args, **kwargs)
        with TrialLoop(cast(Any, fakes[0]).fake_mode):
            return forward(*args, **kwargs)

    form.module.forward = MethodType(run, form.module)


def is_list(name: str, module: nn.Module) -> bool:
    """Return whether a module is a list of experts, by its name; experts for all tokens are none."""
    if not isinstance(module, nn.ModuleList | nn.ModuleDict) or len(module) < 2:
        return False
    own = name.rpartition(".")[2].lower()
    return "expert" in own and "shared" not in own


def has_own_forward(module: nn.Module) -> bool:
    """Return whether the class of a list has a forward."""
    return type(module).forward is not nn.Module.forward


def find_objection(experts: nn.Module) -> str | None:
    """Return why ep cannot share out a list of experts, or `None`."""
    children = list(experts.children())
    kinds = {type(child) for child in children}
    shapes = {tuple((key, p.shape, p.dtype) for key, p in child.named_parameters()) for child in children}
    if len(kinds) > 1:
        return "of several classes"
    if len(shapes) > 1:
        return "whose parameters have different shapes"
    inner = [module for child in children for module in child.modules()]
    if not shapes or any(not shape for _, shape, _ in next(iter(shapes))) or shapes == {()}:
        return "without parameters, or with a single number as one"
    if any(True for child in children for _ in child.buffers()):
        return "with buffers"
    if any(isinstance(module, DropoutBase) and module.p > 0 for module in inner):
        return "with dropout"
    return None


def _call_expert(form: ListForm, number: int, _: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return form.call(number, args, kwargs)


def _is_trial(args: Any, kwargs: Any) -> bool:
    return any(isinstance(leaf, Tensor) and is_fake(leaf) for leaf in tree_leaves((args, kwargs)))


def _refuse_hooks(name: str, expert: nn.Module) -> None:
    """Raise PL657 for hooks of the user's on modules inside of an expert."""
    for own, module in expert.named_modules():
        for hook in list_hooks(module):
            function = getattr(hook, "func", hook)  # of a partial
            place = getattr(function, "__module__", None) or type(function).__module__
            if not place.startswith(("paceline.", "torch.")):
                raise PacelineError(
                    "PL657",
                    saw=f"a hook of {place} on {join_names(name, own)}, with layout.ep above 1.",
                    rule="Under ep, a rank computes some of the experts, for tokens of several microbatches "
                    "at once, so such a hook would see other tensors than in one process.",
                    fix="Register the hook on the mixture around the experts, or leave ep out.",
                )
