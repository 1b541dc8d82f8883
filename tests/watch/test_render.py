"""The text and the JSON of a verdict."""

from __future__ import annotations

from paceline.codes import read_pages
from paceline.watch.protocol.report import SharedPlace, Verdict
from paceline.watch.reasoning.hang import explain_hang
from paceline.watch.reasoning.render import WIDTH, render
from paceline.watch.reasoning.verdict import find_fix, find_rule
from tests.watch.situations import LOADER, Job, call, user

VERDICT = Verdict(
    "PL800",
    "rank 2 never reached all_reduce number 57 of world",
    (
        SharedPlace(
            (0, 1, 3),
            "waits in all_reduce number 57 of world (float32 [128], sum)",
            tuple(user(31 + n, f"level{n}", f"call{n}(x)") for n in range(7)),
        ),
        SharedPlace((2,), "is asleep in time.sleep", (user(88, "fetch", "time.sleep(wait)  " + "#" * 200),)),
    ),
    "A collective completes only when every rank of its group has called it.",
    "Look at the line.",
    ("Likely cause: " + "word " * 40 + "end.",),
)


def test_the_first_line_holds_headline_and_code() -> None:
    assert render(VERDICT).splitlines()[0] == ("rank 2 never reached all_reduce number 57 of world [PL800]")


def test_lines_fit_the_terminal() -> None:
    assert max(map(len, render(VERDICT).splitlines())) <= WIDTH
    assert max(map(len, render(VERDICT, 60).splitlines())) <= 66  # a path isn't broken


def test_places_with_few_frames() -> None:
    lines = render(VERDICT).splitlines()
    assert lines[1] == "  ranks 0, 1 and 3 wait in all_reduce number 57 of world (float32 [128], sum)"
    assert lines[2] == "      at /job/train.py:31 in level0: call0(x)"
    assert lines[5] == "      ... 3 more"
    assert lines[6] == "      from /job/train.py:37 in level6: call6(x)"
    assert lines[7] == "  rank 2 is asleep in time.sleep"


def test_what_comes_last() -> None:
    lines = render(VERDICT).splitlines()
    assert lines[-3:] == [
        "  A collective completes only when every rank of its group has called it.",
        "  Look at the line.",
        "  paceline explain PL800 prints more.",
    ]


def test_a_whole_verdict() -> None:
    job = Job(3)
    for rank in (0, 1):
        job.waits(rank, call(57, at=[user(31, "step", "dist.all_reduce(loss)"), user(60, "main", "step(x)")]))
    job.is_in(2, *LOADER, user(12, "train", "for batch in loader:"))
    verdict = explain_hang(job.seen)
    assert verdict is not None
    assert render(verdict) == (
        "rank 2 never reached all_reduce number 57 of world, where ranks 0 and 1 have waited 60 s at "
        "/job/train.py:31 in step: it waits for the data loader at /job/train.py:12 in train [PL800]\n"
        "  ranks 0 and 1 wait in all_reduce number 57 of world (float32 [128])\n"
        "      at /job/train.py:31 in step: dist.all_reduce(loss)\n"
        "      from /job/train.py:60 in main: step(x)\n"
        "  rank 2 waits for the data loader\n"
        "      at /job/train.py:12 in train: for batch in loader:\n"
        "  A collective completes only when every rank of its group has called it.\n"
        "  Check /job/train.py:12 in train: why does rank 2 not continue there?\n"
        "  paceline explain PL800 prints more."
    )


def test_a_page_begins_with_the_rule_and_the_next_move() -> None:
    for code in (code for code in read_pages() if code.startswith(("PL80", "PL81"))):
        for text in (find_rule(code), find_fix(code)):
            assert 30 < len(text) < 200, code
            assert text[0].isupper() or text.startswith("init_process_group")
