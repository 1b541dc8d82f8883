"""Runs the updates of a step: each changes one model, and the other models are a fixed part of its loss."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from torch import nn

from paceline.data.share import Share
from paceline.errors import PacelineError
from paceline.mesh import Mesh
from paceline.parallel.batchnorm import RunningStatistics
from paceline.parallel.objective import Loss
from paceline.train.cut_probe import Probe, warn_of_counts
from paceline.train.global_loss import GlobalLoss
from paceline.train.precision import Precision
from paceline.train.same_settings import StepSettings
from paceline.train.stopping import StopRequests
from paceline.train.update import Update, Updated


@dataclass(frozen=True)
class _StepInput:
    share: Share
    step: int
    requests: StopRequests
    settings: StepSettings


class Phases:
    """The updates of models that a loss may use together.

    Args:
        models: all of them by name.
        updates: those that have an optimizer, by the same names.
        mesh: the ranks, or `None` in a world of one.
        statistics: BatchNorm's, of all models.
        precision: dtype and device.
        global_loss: the loss over whole global batches, or `None` for one over microbatches.

    Attributes:
        stop_signum: the signal that some rank received, as this step's updates have agreed; or 0.
        comm_s: seconds that this step's updates waited for others.
        is_running: whether updates of a step may run now.
    """

    def __init__(
        self,
        models: Mapping[str, nn.Module],
        updates: Mapping[str, Update],
        mesh: Mesh | None,
        statistics: RunningStatistics,
        precision: Precision,
        *,
        global_loss: GlobalLoss | None,
        microbatch_size: int | None,
    ) -> None:
        self.stop_signum = 0
        self.comm_s = 0.0
        self.is_running = False
        self._models = models
        self._updates = updates
        self._mesh = mesh
        self._statistics = statistics
        self._precision = precision
        self._global_loss = global_loss
        self._microbatch_size = microbatch_size
        # Counting may change the last bits of a gradient, so all ranks that run these samples count.
        self._counts = mesh is None or mesh.dp.rank == 0
        self._probed: set[str] = set()
        self._step: _StepInput | None = None
        self._num_done = 0
        self._done: dict[str, Updated] = {}

    @contextmanager
    def running(
        self, share: Share, step: int, requests: StopRequests, settings: StepSettings, island: int = 0
    ) -> Iterator[None]:
        """Start a step, and note in `is_running` that one runs.

        Args:
            step, settings: as for `Update.run`.
            requests: signals that this rank received.
            island: number of this rank's island, whose random numbers differ from those of others.
        """
        self._step = _StepInput(share, step, requests, settings)
        self._num_done, self._done = island, {}
        self.stop_signum, self.comm_s = 0, 0.0
        self.is_running = True
        try:
            yield
        finally:
            self.is_running = False

    def end(self) -> dict[str, Updated]:
        """End a step and return the last update of each model; raise PL406 if there was none."""
        if not self._done:
            raise PacelineError(
                "PL406",
                saw="step= returned without an update.",
                rule="A step updates at least one model.",
                fix="Call update(name, loss) in it.",
            )
        return self._done

    def run(self, name: str, objective: Loss) -> Updated:
        """Run one update of a model, inside of `running`; collective.

        Args:
            objective: forward and loss.
        """
        if name not in self._updates:
            raise PacelineError(
                "PL404",
                saw=f"update({name!r}, ...), but only {', '.join(self._updates)} have an optimizer.",
                rule="An update changes a model through its optimizer.",
                fix="Use one of these names.",
            )
        # Backward must not add gradients to the other models: they are a fixed part of this loss.
        others = [m for other, m in self._models.items() if other != name]
        frozen = [p for model in others for p in model.parameters() if p.requires_grad]
        for parameter in frozen:
            parameter.requires_grad_(False)
        update, given = self._updates[name], self._step
        assert given is not None
        share = given.share
        try:
            self.probe(name, objective, share)
            if self._global_loss is not None:
                objective, share = self._global_loss.prepare(
                    update.runner, share, step=given.step, phase=self._num_done
                )
            updated = update.run(
                objective,
                share,
                step=given.step,
                phase=self._num_done,
                stop_signum=given.requests.signum,
                settings=given.settings,
                count_flops=update.runner.flops_per_sample is None and self._counts,
            )
        finally:
            for parameter in frozen:
                parameter.requires_grad_(True)
        self._num_done += 1
        self._done[name] = updated
        self.comm_s += updated.comm_s
        self.stop_signum = self.stop_signum or updated.stop_signum
        return updated

    def probe(self, name: str, objective: Loss, share: Share) -> None:
        """Check how the cut into microbatches affects a model, before its first update; collective."""
        if name in self._probed:
            return
        self._probed.add(name)
        update = self._updates[name]
        models, mesh = list(self._models.values()), self._mesh
        dp = None if mesh is None else mesh.dp
        kept = update.runner.list_kept()
        if kept is not None:  # no rank can run a whole forward
            self._statistics.keep(kept, dp)
            if mesh is not None and mesh.dp.rank == mesh.tp.rank == mesh.cp.rank == 0:
                warn_of_counts(kept, share)
            return
        # Ranks of cp hold copies, but their forwards communicate.
        is_divided = update.placement.is_divided or (mesh is not None and mesh.cp.size > 1)
        probe = Probe(models, update.runner, mesh, is_divided=is_divided, dtype=self._precision.name)
        run = objective if self._global_loss is None else self._global_loss.run
        self._statistics.keep(probe.find_buffers(run, share), dp)
        if self._microbatch_size is not None or share.source is None or share.num_microbatches == 1:
            return  # chosen by the user, or nothing is cut
        probe.warn_batchnorm(share)
        if self._global_loss is None:
            probe.check_cut(objective, share)
