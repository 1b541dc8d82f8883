"""Listens to a node's ranks in the launcher, decides when they are stuck, and reports why.

It runs on a thread of the launcher. Each rank connects to a Unix socket in the launch's folder, sends a
`Beat` every second and a `Report` when asked. If a rank cannot answer because its main thread holds Python's
lock in compiled code, a signal makes its interpreter write its stacks into a file.
"""

from __future__ import annotations

import linecache
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.launching.rank.requests import REQUEST, write_whole
from paceline.launching.watcher import SOCKET, WatchedRank, WatchMessage, name_stacks
from paceline.watch.launcher.clock import STALL_S, Clock, Stillness
from paceline.watch.launcher.ends import RankEnds, is_felt
from paceline.watch.launcher.listener import Listener
from paceline.watch.launcher.nodes import EVERY_S, LOST_S, NodeBoard, Others, join_stillness, merge
from paceline.watch.launcher.process import ProcessSampler
from paceline.watch.launcher.running_calls import RunningCalls
from paceline.watch.protocol.report import Beat, Frame, Process, Report, Seen, Verdict
from paceline.watch.protocol.stacks import read_main_stack, read_worker_stack
from paceline.watch.reasoning.death import Failure, explain_failure
from paceline.watch.reasoning.hang import explain_hang
from paceline.watch.reasoning.mismatch import find_mismatch, merge_groups
from paceline.watch.reasoning.not_finite import FirstNotFinite
from paceline.watch.reasoning.render import build_message, render_place
from paceline.watch.reasoning.running import confirm
from paceline.watch.reasoning.sentinels.book import FactBook
from paceline.watch.reasoning.sentinels.rules import ADVICE, RULES
from paceline.watch.reasoning.slow import SlowRanks

# How often the ranks' processes are polled. While collectives arrive, ranks evidently work and are polled
# less often, unless a verdict could then be due before two polls after the last collective.
_POLL_S = 1.0
_POLL_CALM_S = 5.0
_LEAST_FOR_CALM_S = 10.0
# How long a rank may take to answer; its thread may wait for Python's lock.
_ANSWER_S = 2.0
# How long ranks that lose their peer may take until the exception has ended their scripts.
_SETTLE_S = 1.0
# How long it may take to exchange a failure among nodes.
_NODES_S = 4 * EVERY_S
# How long the launcher reads what ended ranks sent before; it has arrived already.
_CLOSING_S = 1.0


class RankWatcher:
    """The watcher of this node's ranks; see `launching.watcher.Watcher`.

    Args:
        hang_after_s: how long all ranks must stand still until they are considered stuck.
        keep_alive: whether a stuck job is left running, for a debugger; `report` then prints the verdict.
        report: prints a verdict that does not end the job.
        has_advice: whether to report what is no mistake by itself, too.
        request: what each rank is asked for before its script's first line; see `rank.requests`.
    """

    entry = "paceline.watch.rank.reporter:begin"

    def __init__(
        self,
        hang_after_s: float,
        *,
        keep_alive: bool,
        report: Callable[[WatchMessage], None],
        has_advice: bool = False,
        request: dict[str, Any] | None = None,
    ) -> None:
        self.final_message: WatchMessage | None = None
        self._hang_after_s = hang_after_s
        self._unwanted: set[str] = set() if has_advice else ADVICE
        self._keep_alive = keep_alive
        self._report = report
        self._request = request
        self._list_ranks: Callable[[], Sequence[WatchedRank]] = tuple
        self._node_name = socket.gethostname()
        self._sampler = ProcessSampler(self._node_name)
        self._processes: dict[int, Process] = {}
        self._reports: dict[int, Report] = {}
        self._asked_at_s = 0.0
        self._was_stuck = False
        self._board: NodeBoard | None = None
        self._has_announced = False
        self._ends = threading.Event()
        self._failed = threading.Event()
        self._has_explained = threading.Event()
        self._is_over = threading.Event()
        self._forget()
        self._listener: Listener
        self._thread = threading.Thread(target=self._run, name="paceline-watch", daemon=True)

    def begin(self, folder: Path, list_ranks: Callable[[], Sequence[WatchedRank]]) -> None:
        """Start the thread; ranks that start from now on find the socket."""
        self._list_ranks = list_ranks
        if self._request is not None:
            write_whole(folder / REQUEST, self._request)
        self._listener = Listener(folder / SOCKET)  # Here, so that no rank inherits it.
        self._thread.start()

    def meet(self, node: int, num_nodes: int, host: str, port: int, attempt: int) -> None:
        """Forget the previous attempt, as the ranks of a new one start on this many nodes."""
        self._forget()
        if self._board is not None:
            self._board.close()
        self._board = NodeBoard(node, num_nodes, host, port, str(attempt)) if num_nodes > 1 else None

    def _forget(self) -> None:
        self._met_s = time.time()
        self._clock, self._running_calls = Clock(time.monotonic()), RunningCalls(self._met_s)
        self._rank_ends, self._failure, self.other_places = RankEnds(), Failure(None), ""
        self._not_finite, self._slow = FirstNotFinite(), SlowRanks(_read_source)
        self._facts = FactBook(RULES, self._unwanted)
        for event in (self._failed, self._has_explained, self._is_over):
            event.clear()

    def note_failure(self, rank: int, status: int) -> None:
        """Ask the remaining ranks where they are, at the first failure only: later ones are its
        consequences."""
        self._rank_ends.note_status(rank, status)
        if not self._failed.is_set() and self._thread.is_alive():
            self._failed.set()
            self._has_explained.wait(
                _ANSWER_S + _SETTLE_S + 1.0 + (_NODES_S if self._board is not None else 0)
            )

    def note_loss(self) -> None:
        """Take note that another node has ended the round, which explains failures: wait no longer."""
        self._is_over.set()

    def explain_failure(self) -> WatchMessage | None:
        """Return why ranks failed, if mismatched collectives or an ended peer are known to be the cause."""
        verdict = self._failure.verdict
        return None if verdict is None else build_message(verdict)

    def end(self) -> None:
        """Stop the thread and close the sockets."""
        self._ends.set()
        if self._board is not None:
            self._board.close()
        if self._thread.ident is not None:
            self._thread.join()
        self._listener.close()

    # ---- receiving

    def _run(self) -> None:
        polled_s = 0.0  # Poll at once: other nodes want to know which ranks are here.
        calm_s = _POLL_CALM_S if self._hang_after_s >= _LEAST_FOR_CALM_S else _POLL_S
        while not self._ends.is_set():
            self._receive(0.25)
            now_s = time.monotonic()
            if self._failed.is_set() and not self._has_explained.is_set():
                self._explain_first_failure()
            is_calm = self._clock.read(now_s).uncollected_s < STALL_S
            if now_s - polled_s >= (calm_s if is_calm else _POLL_S):
                self._poll_processes(polled_s, now_s)
                polled_s = now_s
            self._report_numbers()
            if not self._has_announced and not self._failed.is_set():
                self._judge(now_s)
        self._receive(0.0)  # the last beats
        if not self._has_announced and not self._failed.is_set():
            self._compare_closing()
        self._report_numbers(is_last=True)

    def _receive(self, seconds: float) -> None:
        for message in self._listener.receive(seconds):
            if isinstance(message, Beat):
                self._note_beat(message, time.monotonic())
            elif isinstance(message, Report):
                if not message.is_closing:
                    self._reports[message.rank] = message
                if message.time_s >= self._met_s:
                    self._rank_ends.note_report(message)

    def _note_beat(self, beat: Beat, now_s: float) -> None:
        self._clock.note_beat(beat, now_s)
        if beat.time_s < self._met_s:  # Late, from a rank of the previous attempt.
            return
        self._slow.book.note_beat(beat, now_s)
        self._rank_ends.note_beat(beat)
        if beat.not_finite is not None and beat.not_finite.time_s >= self._met_s:
            self._not_finite.note(beat.rank, beat.not_finite, now_s)
        self._facts.note_own(beat.rank, beat.facts)

    def _poll_processes(self, since_s: float, now_s: float) -> None:
        before = self._processes
        self._processes = self._sampler.sample(self._list_ranks())
        if _describe(before) != _describe(self._processes):
            self._clock.note_change(now_s)
        self._clock.note_processes(self._processes, since_s, now_s)

    def _explain_first_failure(self) -> None:
        try:
            seen = self._collect_failure()
            self._failure = explain_failure(self._ask_nodes(seen), seen.processes, _read_source)
            lines = [render_place(place) for place in self._failure.failed]
            if self._failure.others:
                lines += ["Meanwhile:", *map(render_place, self._failure.others)]
            self.other_places = "\n".join(lines)
            self._report_numbers(is_last=True)
        finally:
            self._has_explained.set()

    # ---- judging

    def _judge(self, now_s: float) -> None:
        others = self._board.read() if self._board is not None else {}
        if self._answer_nodes(others, now_s):
            return
        if not self._processes or all(p.state == "ended" for p in self._processes.values()):
            return
        own = self._clock.read(now_s)
        for state, _ in others.values():
            if state is not None and state.message is not None:
                self._announce(state.message, is_from_other=True)
                return
        self._report_slow(others, now_s)
        stillness = join_stillness(own, others)
        is_stuck = stillness.is_stuck(self._hang_after_s)
        if not is_stuck and not stillness.is_stalled:
            self._asked_at_s = 0.0
            mismatch = self._running_calls.judge(others, time.time(), self._collect_calls, _read_source)
            if mismatch is not None:
                self._announce(build_message(mismatch))
            else:
                self._publish(own, None)
            return
        every_s = STALL_S if is_stuck else 5 * STALL_S
        if now_s - self._asked_at_s < every_s and is_stuck == self._was_stuck:
            return
        self._asked_at_s, self._was_stuck = now_s, is_stuck
        seen = replace(self._collect(), quiet_s=stillness.still_s)
        self._publish(own, seen)
        seen, is_complete = merge(seen, others)
        verdict = self._find_mismatch(seen)
        if verdict is None and is_stuck and is_complete:
            verdict = explain_hang(seen, _read_source)
        if verdict is not None:
            self._announce(build_message(verdict))

    def _compare_closing(self) -> None:
        """Compare all recorded calls of this node's ranks once all of them have ended successfully."""
        ranks = {watched.rank for watched in self._list_ranks() if watched.exit_code == 0}
        if len(ranks) < 2 or len(ranks) < len(self._list_ranks()):
            return
        ends_s = time.monotonic() + _CLOSING_S
        while ranks & self._listener.ranks and time.monotonic() < ends_s:
            self._receive(0.05)
        verdict = confirm(self._rank_ends.closing, _read_source, has_ended=True)
        if verdict is not None:
            self.final_message = build_message(verdict)

    def _report_numbers(self, *, is_last: bool = False) -> None:
        verdict = self._not_finite.read(time.monotonic(), is_last=is_last)
        if self._board is not None:
            self._board.publish(facts=tuple(self._facts.recent))
            for state, _ in self._board.read().values():
                for rank, fact in state.facts if state is not None else ():
                    self._facts.note(rank, [fact])
        for found in ([verdict] if verdict is not None else []) + self._facts.read():
            self._report(build_message(found))

    def _report_slow(self, others: Others, now_s: float) -> None:
        if self._board is not None:
            self._board.publish(paces=self._slow.book.list_paces(now_s))
        for state, age_s in others.values():
            if state is not None:
                self._slow.book.note_others(state.paces, now_s, age_s)
        # What other nodes write and read periodically arrives late.
        verdict = self._slow.read(now_s, 2 * EVERY_S if others else 0.0)
        if verdict is not None:
            self._report(build_message(verdict))

    def _publish(self, own: Stillness, seen: Seen | None, message: WatchMessage | None = None) -> None:
        if self._board is not None:
            self._board.publish(
                name=self._node_name,
                ranks=tuple(self._processes),
                stillness=own,
                seen=seen,
                message=message,
                asked_at_s=self._running_calls.asked_at_s,
                answers=self._running_calls.answers,
            )

    def _find_mismatch(self, seen: Seen) -> Verdict | None:
        calls = {rank: report.calls for rank, report in seen.reports.items()}
        return find_mismatch(calls, merge_groups(seen.reports), _read_source)

    def _announce(self, message: WatchMessage, *, is_from_other: bool = False) -> None:
        """Report a verdict of this node, or one received from another node.

        The other nodes get time to read it before this node's ranks end and theirs lose their peers.
        """
        self._has_announced = True
        if self._board is not None and not is_from_other:
            self._publish(self._clock.read(time.monotonic()), None, message)
            if any(age_s <= LOST_S for _, age_s in self._board.read().values()):
                self._ends.wait(3 * EVERY_S)
        if self._keep_alive:
            self._report(message)
        else:
            self.final_message = message

    def _collect_calls(self) -> dict[int, Report]:
        """Ask all ranks for all calls that they have recorded, and return what came."""
        self._ask(is_full=True)
        return dict(self._reports)

    def _ask(self, *, is_full: bool) -> set[int]:
        """Ask all ranks for reports, and receive them; return the ranks that should have answered."""
        self._reports = {}
        self._listener.ask(is_full=is_full)
        ends_s = time.monotonic() + _ANSWER_S
        self._processes = self._sampler.sample(self._list_ranks(), is_kept=False)
        living = {r for r, process in self._processes.items() if process.state not in ("stopped", "ended")}
        expected = living & self._listener.ranks
        while self._lacks_answer(expected) and time.monotonic() < ends_s:
            self._receive(0.05)
        return expected

    def _collect(self) -> Seen:
        """Ask all ranks for reports, and return what came."""
        expected = self._ask(is_full=False)
        self._processes = self._sampler.sample(self._list_ranks(), is_kept=False)
        silent = [p for r, p in self._processes.items() if r in expected and r not in self._reports]
        loading = [self._processes[r] for r, report in self._reports.items() if _is_loading(report)]
        processes = self._processes | {
            p.rank: replace(p, native=self._read_stack(p, read))
            for read, some in ((read_main_stack, silent), (read_worker_stack, loading))
            for p in some
        }
        world_size = max((watched.world_size for watched in self._list_ranks()), default=0)
        return Seen(world_size, processes, self._reports | self._rank_ends.last)

    def _lacks_answer(self, ranks: set[int]) -> bool:
        """Return whether any of these ranks is still connected and has sent neither an answer nor a last
        report."""
        return bool((ranks & self._listener.ranks) - self._reports.keys() - self._rank_ends.last.keys())

    def _collect_failure(self) -> Seen:
        """Return where all ranks are once one has failed; those that lose their peer get time to report
        it."""
        seen = self._collect()
        ends_s = time.monotonic() + _SETTLE_S
        while time.monotonic() < ends_s and any(
            self._rank_ends.may_end(report)
            for rank, report in seen.reports.items()
            if rank in self._listener.ranks
        ):
            self._receive(0.05)
        self._processes = self._sampler.sample(self._list_ranks(), is_kept=False)
        return self._rank_ends.add_to(seen, self._processes)

    def _ask_nodes(self, seen: Seen) -> Seen:
        """Publish a failure to the other nodes; if it may come from one of them, return it with their
        reports."""
        if self._board is None:
            return seen
        self._publish(self._clock.read(time.monotonic()), seen)
        ends_s = time.monotonic() + _NODES_S - EVERY_S
        joined, is_complete = seen, not is_felt(seen)
        while not (is_complete or self._is_over.is_set()) and time.monotonic() < ends_s:
            self._receive(0.25)
            joined, is_complete = merge(seen, self._board.read())
        if not self._is_over.is_set():
            # The store may end with this node or with theirs, so the others get time to read.
            self._ends.wait(EVERY_S)
        self._board.close()
        return joined

    def _answer_nodes(self, others: Others, now_s: float) -> bool:
        """Publish what is known here once a rank of another node has failed for a reason that may be here."""
        if not any(s is not None and s.seen is not None and is_felt(s.seen) for s, _ in others.values()):
            return False
        if now_s - self._asked_at_s >= EVERY_S:
            self._asked_at_s = now_s
            seen = self._collect()
            self._publish(self._clock.read(now_s), self._rank_ends.add_to(seen, self._processes))
        return True

    def _read_stack(
        self, process: Process, read: Callable[[int, Path], tuple[Frame, ...]]
    ) -> tuple[Frame, ...]:
        watched = next(w for w in self._list_ranks() if w.rank == process.rank)
        return read(process.pid, name_stacks(watched.folder, process.rank))


_LOADER = "torch/utils/data/dataloader.py"


def _is_loading(report: Report) -> bool:
    """Return whether a rank's main thread is in a data loader, which may wait for its workers."""
    return any(frame.file.endswith(_LOADER) for stack in report.stacks[:1] for frame in stack.frames)


def _describe(processes: Mapping[int, Process]) -> dict[int, tuple[int, bool]]:
    """Return each rank's process and whether it has ended, by rank."""
    return {rank: (process.pid, process.state == "ended") for rank, process in processes.items()}


def _read_source(path: str) -> Sequence[str]:
    return [line.rstrip("\n") for line in linecache.getlines(path)]
