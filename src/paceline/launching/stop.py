"""Ends a job when it is asked to: Ctrl-C once asks the ranks to leave, a second one ends them."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from paceline.errors import PacelineError
from paceline.launching.processes.ranks import Attempts, Ranks
from paceline.launching.processes.streams import Pump
from paceline.launching.watcher import Watcher

# `timeout` and some schedulers send a signal twice, to the process and to its group.
_SECOND_AFTER_S = 0.5
# How long the agent may take to pass a signal on; it may be waiting for a node that is gone.
_AGENT_S = 1.0
# The same where there are no ranks.
_NOBODY_S = 0.2
_SHUTDOWN_S = 30.0
# How long ranks that are stuck may take to leave.
_STUCK_S = 3.0


class Interrupted(BaseException):
    """The job was asked to stop, and has. (No `Exception`: torch ignores some of these during its import.)

    Attributes:
        number: the signal.
        num_killed: how many ranks had to be killed, because they did not leave.
    """

    exit_code = 1  # as torchrun's

    def __init__(self, number: int, num_killed: int) -> None:
        super().__init__(number, num_killed)
        self.number = number
        self.num_killed = num_killed

    def __str__(self) -> str:
        name = signal.Signals(self.number).name
        killed = f"; {self.num_killed} did not leave in time and were killed" if self.num_killed else ""
        return f"stopped by {name}{killed}."


@contextmanager
def raise_on_signals() -> Iterator[Callable[[], None]]:
    """Has SIGTERM, SIGHUP, SIGQUIT and Ctrl-C raise `Interrupted`, as long as there are no ranks to ask.

    Gives a function that raises it again, for where somebody has swallowed it. Where the block ends by
    forking ranks, each leaves it with handlers of its own.
    """
    launcher = os.getpid()
    asked: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        if os.getpid() == launcher:
            asked.append(number)
            raise Interrupted(number, 0)

    def check() -> None:
        if asked:
            raise Interrupted(asked[0], 0)

    try:
        with _handled((signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT), interrupt):
            yield check
    except Exception:
        # An import that it interrupts may tell it as an error of its own.
        if os.getpid() == launcher:
            check()
        raise


@contextmanager
def stop_by_signals(
    names: str, patience_s: int | None, rounds: Attempts, ranks: Ranks, *, hangup: int = signal.SIGHUP
) -> Iterator[Stop]:
    """Takes torchrun's signals while ranks run.

    Args:
        names: of the signals, with commas between.
        patience_s: how long ranks may take to leave; None: as TORCH_ELASTIC_SHUTDOWN_TIMEOUT says, else 30.
        rounds: where the agent learns that it is asked to stop.
        ranks: those to pass signals on to.
        hangup: what ranks get where the terminal closes.
    """
    patience = _read_shutdown_s() if patience_s is None else float(patience_s)
    stop = Stop(rounds, ranks, patience, hangup)
    if threading.current_thread() is not threading.main_thread():
        yield stop  # Python delivers signals to the main thread only
        return
    try:
        numbers = {signal.Signals[name.strip()] for name in names.split(",") if name.strip()}
        numbers.add(signal.SIGINT)
    except KeyError as error:
        raise PacelineError(
            "PL343",
            saw=f"--signals-to-handle names {error}.",
            rule="Signals have names such as SIGTERM and SIGUSR1.",
            fix="See kill -l.",
        ) from None
    with _handled(numbers, stop.take):
        yield stop


@contextmanager
def _handled(numbers: Iterable[int], handle: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Has signals handled so in this process; forks that leave the block keep handlers of their own."""
    owner = os.getpid()
    before = {number: signal.getsignal(number) for number in numbers}
    for number, handler in before.items():
        # nohup stays immune to hang-ups. An ignored SIGINT is taken all the same, as torchrun does: shells
        # ignore it for every background job, and whoever sends it by hand means it.
        if number != signal.SIGHUP or handler is not signal.SIG_IGN:
            signal.signal(number, handle)
    try:
        yield
    finally:
        if os.getpid() == owner:
            for number, handler in before.items():
                signal.signal(number, handler if handler is not None else signal.SIG_DFL)


def _read_shutdown_s() -> float:
    with suppress(ValueError):
        return float(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", _SHUTDOWN_S))
    return _SHUTDOWN_S


class Stop:
    """Passes the first signal on to the ranks; a second Ctrl-C, or too long a wait, ends them.

    The agent passes it on by itself, unless it waits for a store that is out of reach: then this does.

    Attributes:
        num_killed: how many ranks had to be killed.
        lost: whether the pump was killed.
    """

    def __init__(self, rounds: Attempts, ranks: Ranks, patience_s: float, hangup: int) -> None:
        self._rounds = rounds
        self._ranks = ranks
        self._patience_s = patience_s
        self._hangup = hangup
        self._asked_s = 0.0
        self._is_urgent = False
        self.num_killed = 0
        self.lost = False

    def take(self, number: int, frame: FrameType | None) -> None:
        """The signals' handler."""
        now = time.monotonic()
        if self._rounds.asked is None:
            self._asked_s = now
            self._rounds.asked = self._hangup if number == signal.SIGHUP else number
        elif number == signal.SIGINT and now - self._asked_s > _SECOND_AFTER_S:
            self._is_urgent = True

    def supervise(self, agent: threading.Thread, pump: Pump | None, watcher: Watcher | None = None) -> None:
        """Waits for the agent's end, or for that of the ranks after a signal or a watcher's word."""
        while agent.is_alive():
            agent.join(0.1)
            if watcher is not None and watcher.told and self._rounds.asked is None:
                self._patience_s = min(self._patience_s, _STUCK_S)
                self.take(signal.SIGTERM, None)
            if pump is not None and pump.has_died():
                self.lost = self._is_urgent = True
                self._rounds.asked = self._rounds.asked or signal.SIGTERM
            if self._rounds.asked is None:
                continue
            waited_s = time.monotonic() - self._asked_s
            if self._is_urgent or waited_s > self._patience_s:
                self.num_killed = len(self._ranks.running)
                for rank in self._ranks.running:
                    self._ranks.kill(rank)
                agent.join(_AGENT_S)
                return
            if not self._ranks.latest and waited_s > _NOBODY_S:
                return  # it waits for other nodes
            if waited_s > _AGENT_S:
                self._ranks.send(self._rounds.asked)
                if not self._ranks.running:
                    agent.join(_AGENT_S)
                    return
