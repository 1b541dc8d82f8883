"""The warnings of saves that take longer than their grace, and of checkpoints on one disk each."""

from __future__ import annotations

import pytest

from paceline.train.state.grace import Grace


@pytest.fixture
def two_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_GRACE_S", "2")


@pytest.mark.usefixtures("two_seconds")
def test_the_first_save_that_takes_too_long_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    grace = Grace(is_main=True)
    for save_s in (None, 1.9, 3.0, 4.0):
        grace.check(save_s)
    (record,) = caplog.records
    assert record.getMessage().startswith(
        "A save took 3.0 s, and after a stop signal ranks are killed within 2.0 s: "
    )
    assert "--grace-s" in record.getMessage()
    assert record.getMessage().endswith("[PL557]")


def test_nothing_is_said_where_no_limit_is_known(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("PACELINE_GRACE_S", raising=False)
    Grace(is_main=True).check(1e9)
    assert caplog.records == []
