"""Ends a job on a signal: the first Ctrl-C asks the ranks to leave, a second one kills them."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from paceline.errors import PacelineError
from paceline.exit_codes import STOPPED
from paceline.launching.processes.ranks import Attempts, Ranks
from paceline.launching.processes.streams import Pump
from paceline.launching.watcher import Watcher
from paceline.place import read_grace_s

# Jobs of schedulers choose one of these to announce their end; torchrun dies of it, and its ranks unsaved.
_BY_SCHEDULERS = (signal.SIGUSR1, signal.SIGUSR2)
# `timeout` and some schedulers send a signal twice, to the process and to its group.
_SECOND_AFTER_S = 0.5
# The agent may take this long to pass a signal on; it may be waiting for a node that has ended.
_AGENT_S = 1.0
# The same if there are no ranks.
_NOBODY_S = 0.2
_SHUTDOWN_S = 30.0
# Ranks that hang may take this long to leave.
_STUCK_S = 3.0


class Interrupted(BaseException):
    """The end of a job on a signal; not an `Exception`, because torch's import ignores some of these.

    Attributes:
        number: the signal; None if this launcher got none, and its ranks stopped with those of another node.
        num_killed: the number of ranks that were killed because they did not leave.
    """

    def __init__(self, number: int | None, num_killed: int) -> None:
        super().__init__(number, num_killed)
        self.number = number
        self.num_killed = num_killed

    @property
    def exit_code(self) -> int:
        """1 after Ctrl-C, as torchrun's; else the code for "stopped, not finished"."""
        return 1 if self.number == signal.SIGINT else STOPPED

    def __str__(self) -> str:
        if self.number is None:
            return f"the ranks stopped before the end (exit code {STOPPED}); the same command continues."
        name = signal.Signals(self.number).name
        killed = f"; {self.num_killed} did not leave in time and were killed" if self.num_killed else ""
        return f"stopped by {name}{killed}."


@contextmanager
def raise_on_signals() -> Iterator[Callable[[], None]]:
    """Make SIGTERM, SIGHUP, SIGQUIT and Ctrl-C raise `Interrupted` as long as there are no ranks to ask.

    Yield a function that raises it again, in case other code has swallowed it. If the block ends by forking
    ranks, each rank leaves it with its own handlers.
    """
    launcher = os.getpid()
    asked: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        if os.getpid() == launcher and not asked:  # a second one would break the end that has begun
            asked.append(number)
            raise Interrupted(number, 0)

    def check() -> None:
        if asked:
            raise Interrupted(asked[0], 0)

    try:
        with _handled((signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT), interrupt):
            yield check
    except Exception:
        # An interrupted import may raise another error in its place.
        if os.getpid() == launcher:
            check()
        raise


@contextmanager
def stop_by_signals(
    names: str, patience_s: int | None, rounds: Attempts, ranks: Ranks, *, hangup: int = signal.SIGHUP
) -> Iterator[Stop]:
    """Handle torchrun's signals while ranks run, and SIGUSR1 and SIGUSR2 if nothing else does.

    Args:
        names: of the signals, separated by commas.
        patience_s: seconds that ranks may take to leave; None: see `read_patience_s`.
        rounds: the agent reads there whether it was asked to stop.
        hangup: the signal that ranks get when the terminal closes.
    """
    patience = read_patience_s(patience_s)
    stop = Stop(rounds, ranks, patience, hangup)
    if threading.current_thread() is not threading.main_thread():
        yield stop  # Python delivers signals to the main thread only
        return
    try:
        numbers = {signal.Signals[name.strip()] for name in names.split(",") if name.strip()}
        numbers |= {signal.SIGINT, *(n for n in _BY_SCHEDULERS if signal.getsignal(n) is signal.SIG_DFL)}
    except KeyError as error:
        raise PacelineError(
            "PL600",
            saw=f"--signals-to-handle names {error}.",
            rule="Signals have names such as SIGTERM and SIGUSR1.",
            fix="See kill -l.",
        ) from None
    with _handled(numbers, stop.take):
        yield stop


@contextmanager
def _handled(numbers: Iterable[int], handle: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Handle signals in this process inside the context; forks that leave it keep their own handlers."""
    owner = os.getpid()
    before = {number: signal.getsignal(number) for number in numbers}
    for number, handler in before.items():
        # Under nohup, SIGHUP stays ignored. An ignored SIGINT is handled anyway, as torchrun does: shells
        # ignore it for every background job, but a user who sends it wants to stop the job.
        if number != signal.SIGHUP or handler is not signal.SIG_IGN:
            signal.signal(number, handle)
    # A parent that blocks signals for its own threads passes that on.
    mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, before)
    try:
        yield
    finally:
        if os.getpid() == owner:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            for number, handler in before.items():
                signal.signal(number, handler if handler is not None else signal.SIG_DFL)


def read_patience_s(wish: float | None) -> float:
    """Return the seconds that ranks may take to leave.

    Args:
        wish: seconds; None: TORCH_ELASTIC_SHUTDOWN_TIMEOUT, else the grace (`place.read_grace_s`), else 30.
    """
    if wish is not None:
        return float(wish)
    with suppress(KeyError, ValueError):
        return float(os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"])
    grace_s = read_grace_s(os.environ)
    return _SHUTDOWN_S if grace_s is None else grace_s


class Stop:
    """The stop of a job: the first signal goes on to the ranks; a second Ctrl-C, or a timeout, kills them.

    Normally the agent passes the signal on. If it waits for an unreachable store, this class does.

    Attributes:
        num_killed: the number of ranks that were killed.
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
        """Handle a signal."""
        now = time.monotonic()
        if self._rounds.asked is None:
            self._asked_s = now
            self._rounds.ask(self._hangup if number == signal.SIGHUP else number)
        elif number == signal.SIGINT and now - self._asked_s > _SECOND_AFTER_S:
            self._is_urgent = True

    def supervise(self, agent: threading.Thread, pump: Pump | None, watcher: Watcher | None = None) -> None:
        """Wait until the agent ends, or until the ranks end after a signal or a watcher's verdict."""
        while agent.is_alive():
            agent.join(0.1)
            if watcher is not None and watcher.final_message and self._rounds.asked is None:
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
                return  # the agent waits for other nodes
            if waited_s > _AGENT_S:
                self._ranks.send(self._rounds.asked)
                if not self._ranks.running:
                    agent.join(_AGENT_S)
                    return
