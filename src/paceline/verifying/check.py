"""Runs the comparison: the reference once, then every layout on ranks of this machine."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from html import escape
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from paceline.errors import PacelineError
from paceline.finding import Finding
from paceline.launching.ending.endings import RankFailed
from paceline.launching.local import launch
from paceline.launching.watcher import HANG_AFTER_S, JobStuck
from paceline.phrases import name_some
from paceline.recipe import Layout
from paceline.recipe.islands import IslandsSection
from paceline.signatures import check_arguments, explain_arguments
from paceline.train.trainer import Trainer
from paceline.verifying.case import Case, show_size
from paceline.verifying.cause import diagnose, starts_in
from paceline.verifying.closeness import FACTORS
from paceline.verifying.compression import settle_islands, settle_slots
from paceline.verifying.layouts import Compared, compare_layouts
from paceline.verifying.precision import KINDS_OF_TYPES
from paceline.verifying.reference import Facts, make_reference
from paceline.verifying.subject import RecipeSubject, Subject, UserSubject

# Runs a function on the given number of fresh ranks of this machine and returns their results by rank.
Run = Callable[[Callable[..., Any], int, tuple[Any, ...]], list[Any]]


@dataclass(frozen=True, repr=False)
class LayoutResult:
    """The result of verifying one layout.

    Attributes:
        layout: as text, resolved.
        num_ranks: the layout was tried on.
        status: `"ok"`, `"differs"`, `"refused"` (Paceline reports why it cannot run) or `"failed"` (a rank
            ended).
        worst: the largest difference in units of its tolerance: at most 1 is rounding.
        worst_noise: the largest difference in units of an ordinary rounding difference.
        worst_where: which tensor had the largest, as `step/kind/name`.
        same_bits: whether nothing differed by a single bit.
        forward_bits: whether the loss of the first step did not; `None` if no step ran.
        num_compared: tensors and numbers, over all ranks.
        seconds: that it took.
        findings: the causes if the status is not `"ok"`.
    """

    layout: str
    num_ranks: int
    status: str
    worst: float = 0.0
    worst_noise: float = 0.0
    worst_where: str = ""
    same_bits: bool = False
    forward_bits: bool | None = None
    num_compared: int = 0
    seconds: float = 0.0
    findings: list[Finding] = field(default_factory=list)

    def __repr__(self) -> str:
        ranks = f"{self.num_ranks} rank{'s' if self.num_ranks > 1 else ''}"
        bits = "the same bits" if self.same_bits else f"largest difference {self.worst:.2g} of its tolerance"
        lines = [
            f"{self.layout or 'one process'} on {ranks}: {self.status}"
            + (f", {bits}" if self.num_compared else "")
        ]
        return "\n".join([*lines, *(f"  {finding}" for finding in self.findings)])


@dataclass(frozen=True, repr=False)
class Verified:
    """The result of `verify`; `dataclasses.asdict` of it can be written as JSON.

    Attributes:
        results: by layout, in the order asked for.
        dtype, reduction: of training.
        num_steps: compared.
        clip_norm: to which gradients were clipped, 0 for not at all.
        num_tensors: of the reference.
        num_microbatches: of each step.
        factor: of a tolerance over the noise.
        tolerances: by tensor and number (`step/kind/name`): floor, scale, tolerance.
        reference_s: seconds that the reference and its reruns took.
        draws: random draws of the forward that depend on the microbatches' size, and under tp on the rank:
            PL450 to PL453. They are not differences by themselves.
        remarks: findings about the comparison that are not faults: something was not compared in fp64
            (PL724).
    """

    results: list[LayoutResult]
    dtype: str
    reduction: str
    num_steps: int
    clip_norm: float
    num_tensors: int
    num_microbatches: list[int]
    factor: float
    tolerances: dict[str, tuple[float, float, float]]
    reference_s: float
    draws: list[Finding]
    remarks: list[Finding] = field(default_factory=list)

    def __repr__(self) -> str:
        """The layouts, a line each, with causes and remarks; the tolerances are in `tolerances`."""
        lines = [
            f"{self.num_steps} steps in {self.dtype}, {self.num_tensors} tensors compared with one process"
        ]
        return "\n".join([*lines, *map(repr, self.results), *map(str, (*self.draws, *self.remarks))])

    def _repr_html_(self) -> str:
        """The same as a table, for a notebook."""
        head = ("layout", "ranks", "status", "largest difference, in tolerances")
        rows = [(each.layout, each.num_ranks, each.status, f"{each.worst:.2g}") for each in self.results]
        cells = ["".join(f"<td>{escape(str(cell))}</td>" for cell in row) for row in (head, *rows)]
        notes = escape("\n".join(map(str, (*self.findings, *self.draws, *self.remarks))))
        return f"<table><tr>{'</tr><tr>'.join(cells)}</tr></table><pre>{notes}</pre>"

    @property
    def ok(self) -> bool:
        """Whether every layout gives the numbers of one process; a refused layout does not count as ok."""
        return all(result.status == "ok" for result in self.results)

    @property
    def findings(self) -> list[Finding]:
        """The findings of all layouts."""
        return [finding for result in self.results for finding in result.findings]


@explain_arguments
def verify(
    model_fn: Callable[[], nn.Module],
    batch_fn: Any,
    loss: Callable[[Any, Any], Any],
    *,
    layouts: Sequence[str | Layout],
    forward: Callable[[Any, Any], Any] | None = None,
    optimizer: Callable[[list[tuple[str, nn.Parameter]]], torch.optim.Optimizer] | None = None,
    steps: int = 3,
    dtype: Literal["auto", "fp64", "fp32", "bf16", "fp16"] = "auto",
    reduction: Literal["fast", "exact"] = "fast",
    clip_norm: float = 1.0,
    microbatch_size: int | None = None,
    global_batch_size: int | None = None,
    seed: int = 0,
    device: str = "auto",
    hang_after_s: float | None = HANG_AFTER_S,
    **settings: Any,
) -> Verified:
    """Verify that layouts of a model train as one process does, and locate where they do not.

    One rank trains the reference for a few steps. Then every layout trains on as many ranks of this machine
    as it has, on the same global batches, in train mode, with dropout, optimizer and clipping. Initial
    weights, loss, every gradient, the global norm, buffers, weights after each step and the optimizer's state
    are compared. Call it in a process that is not a rank itself.

    Args:
        model_fn: builds the model, as a factory for `Trainer`.
        batch_fn: a function from the step (from 1) to a global batch: nested tensors with samples along their
            first dimension, the same for the same step on every rank. Or a data set, with
            `global_batch_size`.
        loss: as `Trainer`'s.
        layouts: for example `["dp_replicate=2", "dp_shard=2 tp=2"]`; a degree left out is 1.
        forward: as `Trainer`'s.
        optimizer: as `Trainer`'s. Default: AdamW with a rate of 1e-3.
        steps: optimizer steps to compare.
        dtype: fp64 separates rounding from faults most clearly. Default `"auto"`: fp64, or fp32 if the model
            does not compute in fp64, or if gradients are compressed.
        reduction: `"fast"` or `"exact"`, which must have the same bits on layouts without tp.
        clip_norm: to clip to; lowered until it clips. 0 for none.
        microbatch_size: samples per forward. Default: an eighth of the global batch.
        global_batch_size: samples per step, for a data set.
        seed: of weights, order of samples and dropout.
        device: as `paceline.start`'s.
        hang_after_s: as `paceline.launch`'s.
        settings: further arguments of `Trainer`.

    Raises:
        PacelineError: PL720 to PL722 if it cannot be verified; PL320 to PL326 for ranks that cannot start.
        RankFailed: the reference itself failed.
    """
    check_arguments(Trainer.__init__, (Trainer,), settings, is_whole=False)
    subject = UserSubject(
        model_fn=model_fn,
        batch_fn=batch_fn,
        loss=loss,
        forward=forward,
        optimizer=optimizer or build_default_optimizer,
        num_steps=steps,
        dtype=dtype,
        reduction=reduction,
        clip_norm=clip_norm,
        microbatch_size=microbatch_size,
        global_batch_size=global_batch_size,
        seed=seed,
        device=device,
        settings=settings,
    )
    resolved = [resolve_layout(layout) for layout in layouts]
    return verify_subject(
        subject.settle_type(),
        resolved,
        run=partial(launch_ranks, hang_after_s=hang_after_s),
        may_narrow=dtype == "auto",
    )


def build_default_optimizer(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """Return AdamW over all trainable parameters."""
    return torch.optim.AdamW([p for _, p in named if p.requires_grad], lr=1e-3)


def resolve_layout(layout: str | Layout) -> Layout:
    """Return a layout with all degrees known; an axis that is not named has degree 1."""
    layout = Layout.parse(layout) if isinstance(layout, str) else layout
    return layout.close()


def launch_ranks(
    fn: Callable[..., Any], nproc: int, args: tuple[Any, ...], hang_after_s: float | None = HANG_AFTER_S
) -> list[Any]:
    """Run a function on ranks of this machine."""
    return launch(fn, nproc, args, hang_after_s=hang_after_s)


def verify_subject(
    subject: Subject,
    layouts: Sequence[Layout],
    *,
    run: Run,
    on_result: Callable[[LayoutResult], None] | None = None,
    may_narrow: bool = False,
) -> Verified:
    """Compare layouts of a subject with one process.

    Args:
        subject: what is trained.
        layouts: with all degrees known; a recipe's own is ignored.
        run: a function that starts ranks.
        on_result: called with the result of every layout when it is done.
        may_narrow: whether a subject in fp64 may be trained in fp32 if its model does not compute in fp64.
    """
    _check(subject, layouts)
    subject, on_compression = settle_slots(subject, layouts)
    subject, on_islands = settle_islands(subject)
    with tempfile.TemporaryDirectory(prefix="paceline-verify-") as folder:
        began_s = time.perf_counter()
        subject, facts, remarks = _make_reference(subject, folder, run, may_narrow)
        reference_s = time.perf_counter() - began_s
        session = _Session(subject, folder, facts, run, on_result)
        results = session.verify(list(layouts))
    return Verified(
        results=results,
        dtype=subject.dtype,
        reduction=subject.reduction,
        num_steps=subject.num_steps,
        clip_norm=facts.clip_norm,
        num_tensors=facts.num_tensors,
        num_microbatches=facts.num_microbatches,
        factor=FACTORS[subject.dtype],
        tolerances={key: (n.floor, n.scale, n.tolerance) for key, n in facts.noise.items()},
        reference_s=reference_s,
        draws=facts.draws,
        remarks=[*on_compression, *on_islands, *remarks, *session.remarks],
    )


def _make_reference(
    subject: Subject, folder: str, run: Run, may_narrow: bool
) -> tuple[Subject, Facts, list[Finding]]:
    """Train the reference; in fp32 if it fails in fp64 and succeeds in fp32."""
    try:
        return subject, run(make_reference, 1, (subject, folder))[0], []
    except RankFailed as error:
        if not may_narrow or subject.dtype != "fp64":
            raise
        narrower = subject.with_dtype("fp32")
        try:
            facts = run(make_reference, 1, (narrower, folder))[0]
        except (RankFailed, PacelineError):
            raise error from None  # it was not the type
        reason = next((line for line in reversed(str(error).splitlines()) if "Error" in line), "").strip()
        remark = Finding(
            "PL724",
            "the model",
            f"Everything was trained and compared in fp32, because the model fails in fp64: {reason}",
            "fp64 separates rounding from faults best, but this model cannot compute in it.",
            "Nothing needs to be done. In fp32, a fault must be larger by about 8 digits to be detected.",
        )
        return narrower, facts, [remark]


class _Session:
    """The layouts that share one reference."""

    def __init__(
        self,
        subject: Subject,
        folder: str,
        facts: Facts,
        run: Run,
        on_result: Callable[[LayoutResult], None] | None,
    ) -> None:
        self._subject, self._folder, self._facts, self._run = subject, folder, facts, run
        self._on_result = on_result
        self._watched = 0
        self._narrower: _Session | None = None
        self.remarks: list[Finding] = []

    def verify(self, layouts: list[Layout]) -> list[LayoutResult]:
        """Verify the layouts, with one launch per number of ranks."""
        done: dict[Layout, LayoutResult] = {}
        for size in sorted({layout.num_ranks for layout in layouts}):
            group = list(dict.fromkeys(layout for layout in layouts if layout.num_ranks == size))
            for result, layout in zip(self._verify_group(group, size), group, strict=True):
                done[layout] = result
                if self._on_result is not None:
                    self._on_result(result)
        return [done[layout] for layout in layouts]

    def _verify_group(self, layouts: list[Layout], size: int) -> list[LayoutResult]:
        try:
            found = self._run(compare_layouts, size, (self._subject, self._folder, self._facts, layouts))
        except (RankFailed, PacelineError, JobStuck) as error:
            if len(layouts) == 1:
                return [_describe_failure(layouts[0], error)]
            # One of the layouts ended the ranks; run alone, each shows whether it was the one.
            return [result for layout in layouts for result in self._verify_group([layout], size)]
        by_layout: list[list[Compared]] = [list(ranks) for ranks in zip(*found, strict=True)]
        return [self._judge(layout, ranks, size) for layout, ranks in zip(layouts, by_layout, strict=True)]

    def _judge(self, layout: Layout, ranks: list[Compared], size: int) -> LayoutResult:
        """Judge one layout: if it differs, run it again with every module watched, and find the cause."""
        differences = [d for compared in ranks for d in compared.differences]
        if not differences:
            return _summarise(layout, ranks, None)
        case = Case(layout, self._subject.dtype, self._facts, differences)
        if self._subject.read(IslandsSection).count > 1:  # whose modules see different weights
            return _summarise(layout, ranks, _describe_islands(case))
        if case.step > 0:
            try:
                case = self._watch(case, size)
            except (RankFailed, PacelineError, JobStuck) as error:
                return _summarise(layout, ranks, _describe_unexplained(case, error))
            result = self._verify_narrower(layout, size) if starts_in(case, self._facts.narrow) else None
            if result is not None and result.status == "ok":
                self._remark_narrow(layout)
                return replace(result, same_bits=False)
        return _summarise(layout, ranks, diagnose(case))

    def _watch(self, case: Case, size: int) -> Case:
        if case.step != self._watched:
            self._facts = self._run(make_reference, 1, (self._subject, self._folder, case.step))[0]
            self._watched = case.step
        words = (self._subject, self._folder, self._facts, [case.layout], case.step)
        ranks = self._run(compare_layouts, size, words)
        return replace(case, facts=self._facts, observed=[rank[0].observed for rank in ranks])

    def _verify_narrower(self, layout: Layout, size: int) -> LayoutResult | None:
        """Verify a layout again in the narrowest type that parts of the model compute in, if it trains in it.

        Its first difference is in such a part, and everything after it follows from that.
        """
        if self._narrower is None:
            kind = max(self._facts.narrow.values(), key=KINDS_OF_TYPES.index)
            subject, folder = self._subject.with_dtype(kind), Path(self._folder) / "narrower"
            folder.mkdir(exist_ok=True)
            try:
                facts = self._run(make_reference, 1, (subject, str(folder)))[0]
            except (RankFailed, PacelineError):
                return None
            self._narrower = _Session(subject, str(folder), facts, self._run, None)
        return self._narrower._verify_group([layout], size)[0]

    def _remark_narrow(self, layout: Layout) -> None:
        narrow = self._facts.narrow
        kinds = ", ".join(sorted(set(narrow.values())))
        names = [name or "the model itself" for name in narrow]
        self.remarks.append(
            Finding(
                "PL724",
                str(layout),
                f"It differs by rounding in {kinds}: the first difference is in a part that computes in "
                f"that type, although training is in {self._subject.dtype}, and all agrees if that is too. "
                f"Such parts are {name_some(names, 4)}.",
                "A model is compared at the precision that it computes in.",
                "Nothing needs to be done. To compare more strictly, make the model compute in the type of "
                "its weights.",
            )
        )


def _describe_islands(case: Case) -> Finding:
    """Return the finding for islands that differ from those in turns in one process."""
    first = max(case.first, key=lambda d: d.ratio)
    names = name_some([d.name for d in case.first])
    kind = first.kind if case.step == 1 else f"global {first.kind}"
    return Finding(
        "PL744",
        f"{case.layout}, step {case.step}",
        f"The {kind} of {names} differs {case.name_ranks(d.rank for d in case.first)}, {show_size(first)}.",
        "Islands on any number of ranks give the numbers of islands that take turns in one process.",
        "Look for code that depends on the rank: random numbers, hooks on gradients, messages of your own. "
        "After step 1 it may act in the steps of one island or in the exchange.",
    )


def _describe_unexplained(case: Case, error: Exception) -> Finding:
    """Return the finding for a layout that differs and whose watched run failed."""
    first = max(case.first, key=lambda d: d.ratio)
    return Finding(
        "PL726",
        f"{case.layout}, step {case.step}",
        f"The {first.kind} {first.name} differs {case.name_ranks(d.rank for d in case.first)}, "
        f"{show_size(first)}. Where it begins is not known, because the run "
        f"that watches every module failed: {error}",
        "Every layout must give the numbers of one process, within rounding.",
        "Train with another layout, and report this message: watching modules must not make a run fail.",
    )


def _summarise(layout: Layout, ranks: list[Compared], finding: Finding | None) -> LayoutResult:
    refused = next((compared.refused for compared in ranks if compared.refused is not None), None)
    if refused is not None:
        found = [Finding(refused.code, str(layout), refused.saw, refused.rule, refused.fix)]
        return LayoutResult(str(layout), layout.num_ranks, "refused", findings=found)
    worst = max(compared.worst for compared in ranks)
    return LayoutResult(
        layout=str(layout),
        num_ranks=layout.num_ranks,
        status="ok" if finding is None else "differs",
        worst=worst[0],
        worst_noise=max(compared.worst_noise for compared in ranks),
        worst_where=worst[1],
        same_bits=all(compared.same_bits for compared in ranks),
        forward_bits=_join_bits([compared.forward_bits for compared in ranks]),
        num_compared=sum(compared.num_compared for compared in ranks),
        seconds=max(compared.seconds for compared in ranks),
        findings=[] if finding is None else [finding],
    )


def _join_bits(found: list[bool | None]) -> bool | None:
    """Return whether all ranks that know it have the bits; `None` if none knows."""
    known = [bits for bits in found if bits is not None]
    return all(known) if known else None


def _describe_failure(layout: Layout, error: RankFailed | JobStuck | PacelineError) -> LayoutResult:
    """Return the result for ranks that ended early: refused if Paceline raised the error, else failed."""
    if isinstance(error, PacelineError):
        found = Finding(error.code, str(layout), error.saw, error.rule, error.fix)
        return LayoutResult(str(layout), layout.num_ranks, "refused", findings=[found])
    finding = Finding(
        "PL717",
        str(layout),
        f"{'The ranks hang' if isinstance(error, JobStuck) else 'A rank failed'}: {error}",
        "A model that trains in one process must train under every legal layout.",
        "Correct the cause in the message, which names the rank and the line.",
    )
    return LayoutResult(str(layout), layout.num_ranks, "failed", findings=[finding])


def _check(subject: Subject, layouts: Sequence[Layout]) -> None:
    if subject.num_steps < 1:
        raise PacelineError(
            "PL720",
            saw=f"steps={subject.num_steps!r}.",
            rule="At least one step is compared.",
            fix="Leave it out for 3 steps; the third shows the effects of the first two.",
        )
    if isinstance(subject, UserSubject):
        subject.check_data()
    if isinstance(subject, RecipeSubject) and subject.recipe.asynchronous.staleness:
        raise PacelineError(
            "PL743",
            saw=f"asynchronous.staleness={subject.recipe.asynchronous.staleness}.",
            rule="Gradients and weights are compared after every step, and stale ones differ.",
            fix="Verify with asynchronous.staleness=0. To compare updates, replay updates.jsonl of a run.",
        )
    if not layouts:
        raise PacelineError(
            "PL720",
            saw="no layout to verify.",
            rule="A layout is compared with one process.",
            fix='Name one: layouts=["dp_replicate=2"], or --layout "dp_replicate=2", or --all.',
        )
