"""The note of a job's last world, and launchers that start again with it."""

from __future__ import annotations

import logging
import os
import socket
from pathlib import Path

import pytest
from torch.distributed.elastic.rendezvous.api import RendezvousInfo

from paceline.errors import PacelineError
from paceline.launching.elastic.members import MembersRendezvous
from paceline.launching.members.note import WorldNote, find_note
from paceline.launching.members.records import Terms
from paceline.launching.members.world import Member, NodeWorld, Waits
from tests.launching.test_meeting import free_port

ONE_OF_TWO = Terms("job", 1, 2)
WORLD = NodeWorld(7, (Member("a", "node0", "127.0.0.1", 1), Member("b", "node1", "127.0.0.1", 2)))


def test_a_note_is_read_as_it_was_written(tmp_path: Path) -> None:
    note = WorldNote(tmp_path / "jobs" / "note.json")
    assert note.read() is None
    note.write(WORLD)
    assert note.read() == WORLD
    note.remove()
    note.remove()
    assert note.read() is None
    assert os.listdir(tmp_path / "jobs") == []


@pytest.mark.parametrize("text", ["", "{", "[]", "1", '{"round": 1}', '{"round": 1, "members": [3]}'])
def test_what_is_not_a_note_counts_as_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "note.json").write_text(text)
    assert WorldNote(tmp_path / "note.json").read() is None


def test_a_note_that_cannot_be_written_is_a_warning_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "jobs").touch()
    note = WorldNote(tmp_path / "jobs" / "note.json")
    with caplog.at_level(logging.WARNING):
        note.write(WORLD)
        note.write(WORLD)
    (record,) = caplog.records
    assert "cannot be written" in record.getMessage()


@pytest.mark.parametrize(
    ("least", "most", "is_noted"), [(1, 2, True), (2, 4, True), (2, 3, False), (2, 2, False)]
)
def test_a_job_whose_parts_could_both_train_is_noted(least: int, most: int, is_noted: bool) -> None:
    assert (find_note(Terms("job", least, most), ("node0", 29400)) is not None) is is_noted


def test_each_job_has_a_note_of_its_own() -> None:
    jobs = [(ONE_OF_TWO, ("node0", 1)), (ONE_OF_TWO, ("node0", 2)), (Terms("b", 1, 2), ("node0", 1))]
    assert len({found.path for terms, at in jobs if (found := find_note(terms, at)) is not None}) == 3


def meet(port: int, join_s: float) -> RendezvousInfo:
    """Return a launcher at its endpoint, until it has formed a round."""
    own = ("127.0.0.1", port)
    handler = MembersRendezvous(
        *(ONE_OF_TWO, Waits(0.6, join_s, 0.2), "127.0.0.1", [own]),
        own=own,
        is_elastic=True,
        on_loss=lambda: None,
        is_asked=lambda: False,
    )
    try:
        return handler.next_rendezvous()
    finally:
        handler._end()  # as a SIGKILL would


def test_a_launcher_that_starts_again_goes_by_its_note() -> None:
    port = free_port()
    note = find_note(ONE_OF_TWO, ("127.0.0.1", port))
    assert note is not None
    meet(port, 20.0)
    first = note.read()
    assert first is not None
    assert first.round == 1
    meet(port, 20.0)
    again = note.read()
    assert again is not None
    assert again.round == 2, "the round goes on from the one before"
    # Number 1 of the last round does not answer, and no connection to it is refused.
    with socket.create_server(("127.0.0.1", 0)) as silent:
        away = Member("away", "node1", "127.0.0.1", silent.getsockname()[1])
        note.write(NodeWorld(3, (*again.members, away)))
        with pytest.raises(PacelineError) as raised:
            meet(port, 1.0)
    assert raised.value.code == "PL374"
    assert "Missing: node1 (127.0.0.1)." in raised.value.saw
    kept = note.read()
    assert kept is not None
    assert kept.round == 3, "it still knows of the others"


def test_a_launcher_whose_others_have_ended_goes_on() -> None:
    port = free_port()
    note = find_note(ONE_OF_TWO, ("127.0.0.1", port))
    assert note is not None
    note.write(NodeWorld(5, (Member("b", "node1", "127.0.0.1", free_port()),)))
    meet(port, 20.0)
    now = note.read()
    assert now is not None
    assert now.round == 6


def test_two_launchers_on_one_machine_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    """Nodes at the loopback are this machine on purpose."""
    own = ("127.0.0.1", free_port())
    handler = MembersRendezvous(
        *(ONE_OF_TWO, Waits(), "127.0.0.1", [own]),
        own=own,
        is_elastic=True,
        on_loss=lambda: None,
        is_asked=lambda: False,
    )
    for address, told in (
        ("127.0.0.1", False),
        ("localhost", False),
        ("10.0.0.1", True),
        ("10.0.0.1", False),
    ):
        caplog.clear()
        handler.formed(NodeWorld(1, tuple(Member(key, "node0", address, 1) for key in "ab")))
        assert ("node0 (10.0.0.1) has several launchers of this job" in caplog.text) is told
    handler._end()
