"""Signals while training: the first is noted, a second one means now, others' handlers stay."""

from __future__ import annotations

import faulthandler
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from paceline.train.stopping import Stopped, StopRequests
from paceline.train.trainer import Trainer
from tests.dist.pool import Pool, RankError


@pytest.fixture
def default_handlers() -> Iterator[None]:
    others = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
    before = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, *others)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for signum in others:
        signal.signal(signum, signal.SIG_DFL)
    yield
    for signum, handler in before.items():
        signal.signal(signum, handler)


@pytest.mark.usefixtures("default_handlers")
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2])
def test_the_first_signal_is_noted(signum: int) -> None:
    requests = StopRequests()
    requests.install()
    requests.install()
    assert requests.signum == 0
    os.kill(os.getpid(), signum)
    assert requests.signum == signum
    # A terminal and a launcher may deliver one Ctrl-C twice, and what came first is what is told.
    os.kill(os.getpid(), signal.SIGINT)
    os.kill(os.getpid(), signal.SIGTERM)
    assert requests.signum == signum
    requests.remove()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.usefixtures("default_handlers")
def test_a_second_one_later_means_now(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = StopRequests()
    requests.install()
    os.kill(os.getpid(), signal.SIGINT)
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 5)
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.usefixtures("default_handlers")
def test_a_users_own_handler_stays() -> None:
    seen: list[int] = []

    def mine(signum: int, frame: Any) -> None:
        seen.append(signum)

    signal.signal(signal.SIGTERM, mine)
    requests = StopRequests()
    requests.install()
    os.kill(os.getpid(), signal.SIGTERM)
    assert (seen, requests.signum) == ([signal.SIGTERM], 0)
    os.kill(os.getpid(), signal.SIGINT)
    assert requests.signum == signal.SIGINT
    requests.remove()
    assert signal.getsignal(signal.SIGTERM) is mine


@pytest.mark.usefixtures("default_handlers")
def test_a_handler_of_faulthandler_stays(tmp_path: Path) -> None:
    requests = StopRequests()
    with (tmp_path / "stacks").open("w") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks)
        try:
            requests.install()
            os.kill(os.getpid(), signal.SIGUSR1)
        finally:
            requests.remove()
            faulthandler.unregister(signal.SIGUSR1)
    assert requests.signum == 0
    assert "test_a_handler_of_faulthandler_stays" in (tmp_path / "stacks").read_text()


@pytest.mark.usefixtures("default_handlers")
def test_a_handler_set_afterwards_stays_too() -> None:
    requests = StopRequests()
    requests.install()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    requests.remove()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.usefixtures("default_handlers")
def test_other_threads_leave_signals_alone() -> None:
    requests = StopRequests()
    thread = threading.Thread(target=requests.install)
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_stopped_is_an_exit_that_says_whether_to_continue() -> None:
    stopped = Stopped(signal.SIGINT, 12, None)
    assert isinstance(stopped, SystemExit)
    assert (stopped.code, stopped.step, stopped.signal_name, stopped.saved) == (130, 12, "SIGINT", None)
    assert str(stopped) == "stopped by SIGINT after step 12; nothing saved, there is no run folder"
    saved = Stopped(signal.SIGTERM, 3, "runs/x/checkpoints/step-00000003")
    assert saved.code == 75
    assert str(saved) == "stopped by SIGTERM after step 3; saved runs/x/checkpoints/step-00000003"


def train(world: Any, both: bool) -> Any:
    """Raw batches: the next `step` is where the run stops."""
    trainer = Trainer(
        nn.Linear(3, 1),
        loss=lambda output, batch: (output.sum(), len(output)),
        optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.1),
    )
    for number in range(6):
        if number == 2 and (both or world.rank == 1):
            os.kill(os.getpid(), signal.SIGINT if world.rank == 0 else signal.SIGTERM)
        trainer.step(torch.randn(2, 3))
    return None


@pytest.mark.parametrize("both", [False, True])
def test_steps_on_raw_batches_stop_together_and_sigterm_wins(ranks: Pool, both: bool) -> None:
    with pytest.raises(RankError) as caught:
        ranks.run(train, args=(both,))
    for rank in (0, 1):
        assert "stopped by SIGTERM after step 3" in caught.value.reports[rank]


def train_two(world: Any, folder: str) -> tuple[int, str | None]:
    """Get a signal while a second trainer trains; return where it stopped."""
    trainers = [
        Trainer(
            nn.Linear(3, 1),
            loss=lambda output, batch: (output.sum(), len(output)),
            optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.1),
        )
        for _ in range(2)
    ]
    for number, trainer in enumerate(trainers):
        trainer.resume(f"{folder}/{number}")
    for _ in range(5):
        trainers[0].step(torch.ones(2, 3))
    for _ in range(2):
        trainers[1].step(torch.ones(2, 3))
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    trainers[1].step(torch.ones(2, 3))  # in which ranks agree
    with pytest.raises(Stopped) as stopped:
        trainers[1].step(torch.ones(2, 3))
    return stopped.value.step, stopped.value.saved


def test_a_second_trainer_of_a_process_stops_too(ranks: Pool, tmp_path: Path) -> None:
    saved = str(tmp_path / "1" / "checkpoints" / "step-00000003")
    assert ranks.run(train_two, args=(str(tmp_path),)) == [(3, saved)] * 2
    assert ranks.run(train_two, args=(str(tmp_path),)) == [(6, saved.replace("-00000003", "-00000006"))] * 2


def handlers_after(world: Any) -> list[bool]:
    before = signal.getsignal(signal.SIGTERM)
    trainer = Trainer(
        nn.Linear(3, 1),
        loss=lambda output, batch: (output.sum(), len(output)),
        optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.1),
    )
    untouched = signal.getsignal(signal.SIGTERM) == before
    trainer.step(torch.randn(2, 3))
    taken = signal.getsignal(signal.SIGTERM) != before
    world.close()
    return [untouched, taken, signal.getsignal(signal.SIGTERM) == before]


def test_signals_are_taken_while_training_only(ranks: Pool) -> None:
    assert ranks.run(handlers_after, nproc=1) == [[True, True, True]]


class SlowSamples(torch.utils.data.Dataset[torch.Tensor]):
    """One hundred seconds of samples; the process that reads the third gets a signal."""

    def __init__(self, is_asked: bool) -> None:
        self.is_asked, self.num_read = is_asked, 0

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> torch.Tensor:
        self.num_read += 1
        if self.is_asked and self.num_read == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.1)
        return torch.ones(3)


def evaluate(world: Any, folder: str, asked_rank: int, way: str) -> tuple[int, str, bool, int, bool]:
    """Get a signal after a step; return how it ended, and whether the model trains and numbers go on."""
    trainer = Trainer(
        nn.Linear(3, 1),
        loss=lambda output, batch: (output.sum(), len(output)),
        optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.1),
    )
    slow = SlowSamples(world.rank == asked_rank)
    valid = trainer.loader(slow, global_batch_size=2, shuffle=False, name="valid")  # type: ignore[arg-type]
    trainer.resume(folder)
    for batch in trainer.loader(torch.ones(8, 3), global_batch_size=4):  # type: ignore[arg-type]
        trainer.step(batch)
    before = torch.get_rng_state()
    ways: dict[str, Callable[[], Any]] = {
        "evaluate": lambda: trainer.evaluate(valid),
        "work": lambda: [(trainer.leave_if_asked(), slow[number]) for number in range(600)],
    }
    with pytest.raises(Stopped) as stopped:
        ways[way]()
    same = torch.equal(before, torch.get_rng_state())
    trainer.close()
    assert stopped.value.saved is not None
    return stopped.value.step, Path(stopped.value.saved).name, trainer.model.training, slow.num_read, same


@pytest.mark.parametrize(
    ("nproc", "asked_rank", "way"),
    [(2, 1, "evaluate"), (1, 0, "evaluate"), (2, 0, "work"), (1, 0, "work")],
)
def test_long_work_ends_and_the_step_before_is_saved(
    ranks: Pool, tmp_path: Path, nproc: int, asked_rank: int, way: str
) -> None:
    found = ranks.run(evaluate, nproc=nproc, args=(str(tmp_path / "run"), asked_rank, way))
    assert [each[:3] for each in found] == [(2, "step-00000002", True)] * nproc
    assert len({each[3] for each in found}) == 1, "all ranks leave before the same batch"
    assert all(each[3] < 300 and each[4] for each in found)


def leave_early(world: Any) -> int:
    """Iterate without steps on rank 0 alone, and return how many batches it had."""
    trainer = Trainer(
        nn.Linear(3, 1),
        loss=lambda output, batch: (output.sum(), len(output)),
        optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.1),
    )
    batches = trainer.loader(torch.ones(40, 3), global_batch_size=4, shuffle=False)  # type: ignore[arg-type]
    return sum(1 for _ in batches) if world.is_main else 0


def test_a_rank_may_look_at_batches_alone(ranks: Pool) -> None:
    assert ranks.run(leave_early, nproc=2) == [10, 0]
