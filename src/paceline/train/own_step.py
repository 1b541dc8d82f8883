"""`LoopStep`: one step of a `Loop`: passes over the microbatches of a global batch."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, nullcontext
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import Tensor

from paceline.data.share import Share
from paceline.errors import PacelineError
from paceline.generators import preserved_generators
from paceline.parallel.placement import local
from paceline.signatures import explain_arguments
from paceline.torch_seams.operators import multiply_each
from paceline.train.building import check_numbers
from paceline.train.metrics import read_number
from paceline.train.runners.work import IDLE, Round, Work
from paceline.train.update import CLIP_EPS, Updated

if TYPE_CHECKING:
    from paceline.train.loop import Loop


# A relative difference of two norms of the same gradients.
_ROUNDING = 1e-6
# The step of which a pass is open in this process, if any.
_OPEN: list[LoopStep] = []


class LoopStep:
    """One step of a loop: a global batch, of which the inner loop gets this rank's microbatches.

        for batch in step:
            criterion(model(batch["x"]), batch["y"]).backward()

    Around each microbatch, generators are seeded by (seed, step, pass, microbatch) and dropout depends on
    its samples alone. A rank without microbatches joins the sums; under dp_shard its inner loop runs on a
    borrowed microbatch that does not count. After the loop every trained parameter has the gradient of the
    mean over the global batch, added to the one that it had before. Iterate again for another pass over the
    same samples with other random numbers.

    Attributes:
        number: of the step, from 1; continues over resumes.
        epoch: of the global batch.
        num_samples: of the global batch, over all ranks.
        means: after a pass, by name, the means of the values given to `mean`.
    """

    def __init__(self, loop: Loop, share: Share, *, is_numbered: bool = False) -> None:
        self.number = loop.step_number + 1
        self.epoch, self.num_samples = share.epoch, share.num_samples
        self.means: dict[str, float] = {}
        self._loop, self._share, self._is_numbered = loop, share, is_numbered
        self._num_passes, self._is_closed = 0, False
        # Whether a pass has begun that did not reach its end, and the pass.
        self._is_incomplete = False
        self._pass: Callable[[], Generator[Any, None, None] | None] = lambda: None
        self._work: Work | None = None
        self._round: Round | None = None
        self._done: Updated | None = None
        self._lr, self._comm_s = math.nan, 0.0
        self._values: dict[str, float] = {}

    def __repr__(self) -> str:
        if self._done is None or self._is_incomplete:
            return f"step {self.number}, before the end of its inner loop"
        shown = {"loss": self.loss, "gradient norm": self.grad_norm, **self.means}
        return f"step {self.number}: " + ", ".join(f"{name} {value:.6g}" for name, value in shown.items())

    # After a pass; the same on every rank.

    @property
    def loss(self) -> float:
        """Mean of the losses given to `step.backward`; nan after plain `loss.backward()`."""
        return self._result.loss

    @property
    def grad_norm(self) -> float:
        """Global norm of the last pass's gradient."""
        return self._result.grad_norm

    @property
    def weight(self) -> float:
        """Sum of the weights of the last pass's microbatches."""
        return self._result.weight

    @property
    def skipped(self) -> str | None:
        """The reason why the last pass left no gradients, or `None`."""
        return self._result.skipped

    # A pass

    def __iter__(self) -> Iterator[Any]:
        return self.of()

    def of(self, *names: str) -> Iterator[Any]:
        """Iterate over the microbatches; collect gradients of these models only. Without names, of all."""
        if self._is_closed:
            raise _order_error(
                f"another pass over step {self.number}, which has ended.",
                "A step ends with the next one, and with save().",
                "Make all passes of a step before it. For two data sets in one step, make one loader of a "
                "data set of pairs.",
            )
        found = self._run_pass(names)
        self._pass = ref(found)
        return found

    def backward(self, loss: Tensor, *, weight: float | None = None, retain_graph: bool = False) -> None:
        """Run backward as `loss.backward()` does, and let all ranks see the loss.

        Gradients are summed over ranks during the last one, and have the bits of `Trainer` for any weights.

        Args:
            loss: the mean over the microbatch; several in one microbatch add up.
            weight: of the microbatch, in place of the one that `Loop(weight=)` returns.
            retain_graph: whether another backward of this microbatch follows.

        Raises:
            PacelineError: PL644 after another kind of backward, or after the one that sums over ranks.
        """
        work, each = self._inside("step.backward(loss)")
        weight = None if weight is None else check_weight("step.backward got the weight", weight)
        if not isinstance(loss, Tensor) or loss.dim() or not loss.requires_grad:
            kind = f" of shape {list(loss.shape)}" if isinstance(loss, Tensor) else ""
            raise PacelineError(
                "PL410",
                saw=f"step.backward got a {type(loss).__name__}{kind}.",
                rule="It takes one number that depends on trained parameters: the mean over the microbatch.",
                fix="Call it with loss.mean(), inside of the inner loop and outside of torch.no_grad().",
            )
        self._loop.update.runner.backward_own(work, each, loss, weight, retain_graph=retain_graph)

    def mean(self, name: str, value: Any, weight: float | None = None) -> None:
        """Add this microbatch's mean of a value; `means[name]` is that of the global batch after the pass.

        Args:
            name: one of `Loop(means=)`.
            value: a number or a tensor of one.
            weight: of the value. Default: that of the microbatch.
        """
        _, each = self._inside("step.mean(...)")
        names = self._loop.mean_names
        if name not in names:
            raise PacelineError(
                "PL404",
                saw=f"step.mean({name!r}) with means={list(names)}.",
                rule="Ranks exchange the values together with their gradients, so all know them beforehand.",
                fix=f"Pass Loop(means={[*names, name]}).",
            )
        if each.index == IDLE:
            return
        assert each.means is not None
        assert each.weight is not None
        share = each.weight.item() if weight is None else check_weight("step.mean got the weight", weight)
        place = 2 * names.index(name)
        number = value.detach() if isinstance(value, Tensor) else value
        each.means[place] += read_number(name, number) * share
        each.means[place + 1] += share

    @explain_arguments
    def clip_grad_norm_(self, max_norm: float, model: str | None = None) -> float:
        """Scale the gradients down to a global norm, right under every layout; return the norm before.

        Args:
            max_norm: the largest norm.
            model: the name of one of several models; `None` for all together.

        Raises:
            PacelineError: PL400 for another norm than a number of at least 0.
        """
        check_numbers(max_norm=(min(max_norm, sys.float_info.max), 0))  # infinity reads the norm
        known, named = self._result.grad_norm, self._loop.parameters_of(() if model is None else (model,))
        norm = float(self._loop.update.measure_norm(named))
        # Of gradients that nobody has changed, the agreed norm has the bits of `Trainer`.
        norm = known if self.skipped or math.isclose(norm, known, rel_tol=_ROUNDING) else norm
        gradients = [local(p.grad) for p in named.values() if p.grad is not None]
        scale = min(1.0, max_norm / (norm + CLIP_EPS)) if math.isfinite(norm) else 1.0
        if scale != 1.0 and gradients:
            multiply_each(gradients, scale)
        return norm

    def log(self, **values: float) -> None:
        """Add values of rank 0 to this step's row of metrics, see `Trainer.log`."""
        self._values |= {name: read_number(name, value) for name, value in values.items()}

    def close(self, *, quietly: bool = False) -> None:
        """End the step: record it, and move the position in the data behind it.

        Args:
            quietly: at the end of the world: no error.

        Raises:
            PacelineError: PL649 if a pass was left early.
        """
        if self._is_closed:
            return
        self._is_closed = True
        left = self._pass()
        if left is not None:
            left.close()
        if not quietly:
            self._refuse_left()
        if self._done is None or (quietly and sys.exc_info()[0] is not None):
            return
        values = {**self.means, **self._values}
        self._loop.record(self._share, self._done, lr=self._lr, comm_s=self._comm_s, values=values)

    @property
    def _result(self) -> Updated:
        if self._done is None or self._is_incomplete:
            raise _order_error(
                f"a result of step {self.number} before the end of its inner loop.",
                "Ranks sum gradients and agree on results at its end.",
                "Read it after `for batch in step:`.",
            )
        return self._done

    def _inside(self, what: str) -> tuple[Work, Round]:
        if self._work is None or self._round is None:
            raise _order_error(
                f"{what} outside of the loop over a step's microbatches.",
                "It belongs to a microbatch.",
                "Call it in `for batch in step:`.",
            )
        return self._work, self._round

    def _refuse_left(self) -> None:
        if self._is_incomplete:
            raise PacelineError(
                "PL649",
                saw=f"rank {self._loop.world.rank} left the loop over the microbatches of step {self.number} "
                "early (break, return or an exception).",
                rule="All ranks sum gradients at its end, and other ranks wait there.",
                fix="Use `continue` to leave out a microbatch. After an exception resume from a checkpoint.",
            )

    def _run_pass(self, names: tuple[str, ...]) -> Generator[Any, None, None]:
        refuse_in_pass("another pass")
        self._refuse_left()
        loop = self._loop
        wanted = loop.parameters_of(names)
        before = [(p, p.grad) for p in loop.parameters_of(()).values()]
        left_out = set(map(id, (p for p, _ in before))) - set(map(id, wanted.values()))
        self._is_incomplete = True
        _OPEN.append(self)
        try:
            with preserved_generators(loop.world.device):  # draws of the loop between steps go on
                unwanted = [p for p, _ in before if id(p) in left_out]
                work = self._work = loop.begin_pass(
                    self._share, self._num_passes, unwanted, is_numbered=self._is_numbered
                )
                self._num_passes += 1
                first = loop.watch_pass()
                try:
                    compared = loop.compare_inputs(self._counts) if self._is_numbered else nullcontext()
                    with compared, closing(loop.update.runner.rounds(work)) as rounds:
                        for each in rounds:
                            self._round = each
                            yield each.batch
                            self._round = None
                            if first is not None:
                                first.end_microbatch()
                    done = loop.end_pass(work, first)
                finally:
                    self._round = self._work = None
                    loop.update.end()
            _put_back(before, left_out)
            self._is_incomplete = False
        finally:
            _OPEN.remove(self)
        self._done = done
        self._lr, self._comm_s = loop.update.lr, self._comm_s + done.comm_s
        self.means |= done.read_means(loop.mean_names)

    def _counts(self) -> bool:
        return self._round is not None and self._round.index != IDLE


def refuse_in_pass(what: str) -> None:
    """Raise PL649 for something that ranks do together, while the loop over a step's microbatches is open."""
    if _OPEN:
        raise _order_error(
            f"{what} while the loop over the microbatches of step {_OPEN[0].number} is open.",
            "How often that loop's body runs depends on the number of ranks.",
            "Call it after the inner loop, once per step. `continue` leaves out a microbatch.",
        )


def check_weight(what: str, value: Any) -> float:
    """Return the weight of a microbatch as a number; raise PL400 for another one than of at least 0."""
    number = float(value) if isinstance(value, (int, float)) or getattr(value, "ndim", 1) == 0 else -1.0
    if not 0 <= number < math.inf:
        raise PacelineError(
            "PL400",
            saw=f"{what} {value!r}.",
            rule="The weight of a microbatch is a number of at least 0.",
            fix='Pass for example (batch["labels"] != -100).sum().',
        )
    return number


@torch.no_grad()
def _put_back(before: list[tuple[Tensor, Tensor | None]], left_out: set[int]) -> None:
    """Add the gradients from before a pass, and drop what it computed for models that it does not train."""
    for parameter, grad in before:
        if id(parameter) in left_out:
            parameter.grad = grad
        elif grad is not None:
            parameter.grad = grad if parameter.grad is None else grad.add_(parameter.grad)


def _order_error(saw: str, rule: str, fix: str) -> PacelineError:
    return PacelineError("PL649", saw=saw, rule=rule, fix=fix)
