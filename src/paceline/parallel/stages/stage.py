"""Runs one stage of a model: the user's whole forward, but computes only the stage's own part.

Calls that belong to earlier stages are answered: a module is not run, and its result is what was received, or
a tensor of the right shape that nothing reads. The forward is left when the first block of the next stage is
called. Inside the stage's own blocks nothing is watched.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from paceline.errors import PacelineError
from paceline.parallel.stages.cut import StageCut
from paceline.parallel.stages.record import Made, Result
from paceline.parallel.stages.walk import Call, CompiledBlock, Walker, list_tensors, name_function
from paceline.torch_seams.dispatch import without_functions
from paceline.torch_seams.trees import tree_leaves, tree_unflatten

_STUB = "paceline_stub"


def is_stub(tensor: Tensor) -> bool:
    """Return whether a tensor stands for one of another stage: it has a shape, and no numbers."""
    return hasattr(tensor, _STUB)


class _Left(BaseException):
    """The forward has reached the next stage. No error, so that no `except Exception` of a model stops it."""


class StageRun(Walker):
    """One run of a stage.

    Args:
        modules: all of the model's, with their full names; this stage's have their parameters.
        blocks: as in the record.
        cut: of a forward on a batch of the same shapes.
        received: the tensors of `cut.crossings[stage]`.
        has_modes: whether the model's modules use modes for functions of torch, as tp does; these see the
            calls inside of blocks too.
    """

    def __init__(
        self,
        modules: Sequence[tuple[str, nn.Module]],
        blocks: Collection[str],
        cut: StageCut,
        stage: int,
        received: dict[Made, Tensor],
        device: torch.device,
        has_modes: bool,
    ) -> None:
        super().__init__(modules, blocks)
        self._has_modes = has_modes
        self._sent = {t.made: received[t.made] for t in cut.crossings[stage + 1] if t.made in received}
        self._record = cut.record
        self._first, self._end = cut.starts[stage], cut.starts[stage + 1]
        self._is_last = stage + 1 == cut.num_stages
        self._received = received
        self._device = device
        self._wanted = {tensor.made: None for tensor in cut.crossings[stage + 1]}
        self._stubs: dict[int, Tensor] = {}

    def compute(self, run: Callable[[], Any]) -> tuple[dict[Made, Tensor], Any]:
        """Return the tensors of `cut.crossings[stage + 1]`, and the model's output on the last stage.

        Args:
            run: calls the model.
        """
        output = None
        try:
            with self.following():
                output = run()
        except _Left:
            pass
        else:
            if not self._is_last:
                raise _path_error("it ended before the next stage began")
        missing = self._wanted.keys() - self._sent.keys()
        if missing:
            raise _path_error(f"{len(missing)} of the tensors that the next stage needs were not made")
        return {made: self._sent[made] for made in self._wanted}, output

    def enter_block(self, name: str) -> None:
        super().enter_block(name)
        if self.segment >= self._end and not self._is_last:
            raise _Left  # before the hooks of recompute, which would wait for the end of the block

    def run_module(self, name: str, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        if self._is_inside:
            return call(*args, **kwargs)
        with self.calling_module(name):
            path = self.path
            result = self._record.modules.get(path)
            if result is None:
                raise _path_error(f"{name or 'the model'} is called where the trial forward did not call it")
            if self.segment != result.begin:
                raise _path_error(
                    f"{name or 'the model'} is called after {self.segment} blocks, not {result.begin}"
                )
            is_open = path in self._record.opened
            if result.end < self._first and not is_open and self._is_learned(result):
                self.segment = result.end
                return self._answer(result, list_tensors((args, kwargs)))
            if name not in self._blocks or is_open or self.segment < self._first:
                return call(*args, **kwargs)
            calls_others = result.end > self.segment
            with (
                nullcontext() if calls_others else self.inside(),
                self.hidden() if self._has_modes else without_functions(),
            ):
                output = call(*args, **kwargs)
            self._take_all(result, output)
            return output

    def run_block(self, block: CompiledBlock, args: Any, kwargs: Any) -> Any:
        self.enter_block(block.name)
        path = f"{self.path}/{block.name}~{self._calls[-1][block.name]}".removeprefix("/")
        result = self._record.modules.get(path)
        if result is None or path in self._record.opened or self.segment < self._first:
            self._begun = block.name
            return block.call(*args, **kwargs)
        with self.calling(block.name), self.unfollowed(), without_functions():
            output = block.compiled_call(*args, **kwargs)
        self._take_all(result, output)
        return output

    def _take_all(self, result: Result, output: Any) -> None:
        for leaf, value in zip(result.leaves, tree_leaves(output), strict=True):
            self._take(leaf.made, value)

    def run_function(self, call: Call, function: Any, args: Any, kwargs: Any) -> Any:
        result = self._record.functions.get(call)
        if result is not None and result.function != name_function(function):
            raise _path_error(
                f"{self.module_name or 'the model'} calls {name_function(function)} where the trial forward "
                f"called {result.function}"
            )
        if self.segment < self._first and result is not None:
            inputs = list_tensors((args, kwargs))
            if result.function == "__setitem__":
                return None
            if self._is_learned(result):
                return self._answer(result, inputs)
            changes_stub = all(leaf.alias is not None for leaf in result.leaves)
            if changes_stub and any(id(t) in self._stubs or t.requires_grad for t in inputs):
                return self._answer(result, inputs)  # an operation in place on what is not here
        output = function(*args, **kwargs)
        tensors = list_tensors(output)
        if tensors and result is None:
            raise _path_error(f"{self.module_name or 'the model'} calls {name_function(function)} once more")
        for place, tensor in enumerate(tensors):
            self._take((call, place), tensor)
        return output

    def _is_learned(self, result: Result) -> bool:
        return any(leaf.made in self._record.learned for leaf in result.leaves if leaf.made is not None)

    def _take(self, made: Made | None, value: Any) -> None:
        if made in self._wanted and made not in self._sent and isinstance(value, Tensor):
            assert made is not None
            self._sent[made] = value

    def _answer(self, result: Result, inputs: list[Tensor]) -> Any:
        leaves: list[Any] = []
        for leaf in result.leaves:
            if leaf.alias is not None:
                leaves.append(inputs[leaf.alias])
            elif leaf.shape is None:
                leaves.append(leaf.value)
            elif leaf.made in self._received:
                assert leaf.made is not None
                leaves.append(self._received[leaf.made])
            else:
                with without_functions():
                    # One number for the whole tensor: it has a shape and costs no memory.
                    stub = torch.zeros((), dtype=leaf.dtype, device=self._device).expand(leaf.shape)
                setattr(stub, _STUB, True)
                self._stubs[id(stub)] = stub
                leaves.append(stub)
        return tree_unflatten(leaves, result.spec)


def _path_error(saw: str) -> PacelineError:
    return PacelineError(
        "PL482",
        saw=f"the forward does not repeat the trial forward on a batch of these shapes: {saw}.",
        rule="Under pp, every stage follows the calls of the trial forward.",
        fix="Make the forward depend on shapes and settings alone, not on values or on earlier calls.",
    )
