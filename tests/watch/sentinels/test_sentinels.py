"""Designs on real ranks, and the rules on what these note."""

from __future__ import annotations

import os
import sys
import tempfile
import traceback
import warnings
from typing import Any

import pytest

from paceline.watch.launcher.clock import Stillness
from paceline.watch.launcher.nodes import NodeState
from paceline.watch.protocol.report import Fact, Verdict
from paceline.watch.protocol.wire import from_json, to_json
from paceline.watch.reasoning.sentinels.book import FactBook, Proof, explain
from paceline.watch.reasoning.sentinels.rules import ADVICE, RULES
from tests.watch.sentinels.healthy import HEALTHY
from tests.watch.sentinels.planted import ADVISED, FIRST, PLANTED

STILL = Stillness(0.0, 0.0, has_waiting=False)
BATCHES = {"batches": [[*range(12)], [*range(12, 24)]], "is_split": False}
RECORDER = {"TORCH_FR_BUFFER_SIZE": "1000"}


def run_designs(world: Any, names: list[str], folder: str) -> dict[str, Any]:
    """Return what this rank has noted in each design, or its error."""
    import torch
    import torch.distributed as dist

    from paceline.watch.rank.first_not_finite import Gradients
    from paceline.watch.rank.sentinels.sentinels import Sentinels

    os.chdir(folder)
    found: dict[str, Any] = {}
    for name in names:
        gradients = Gradients()
        sentinels = Sentinels(gradients, lambda: 0)
        gradients.install(torch)
        sentinels.install(torch)
        torch.manual_seed(0)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                (HEALTHY.get(name) or {**PLANTED, **ADVISED}[name][0])()
            sentinels.end()
            if sentinels.error is not None:
                raise sentinels.error
        except Exception as error:
            print(f"--- {name}", file=sys.stderr)
            traceback.print_exc()
            found[name] = repr(error)
        finally:
            sentinels.end()
            gradients.remove()
        facts: list[str] = []
        while more := sentinels.collect():
            facts += map(to_json, more)
        found.setdefault(name, facts)
        dist.barrier()
    return found


def judge(runs: list[dict[str, Any]], name: str) -> list[Verdict]:
    """Return the verdicts on a design; the facts come in the order of passes, as beats bring them."""
    if errors := [run[name] for run in runs if isinstance(run[name], str)]:
        return [Verdict("error", errors[0], (), "", "")]
    book = FactBook(RULES, () if name in ADVISED else ADVICE)
    facts = [(rank, from_json(Fact, fact)) for rank, run in enumerate(runs) for fact in run[name]]
    for rank, fact in sorted(facts, key=lambda pair: pair[1].passes):
        book.note_own(rank, [fact])
    return book.read()


def run_and_judge(ranks: Any, names: list[str], nproc: int = 2) -> dict[str, list[Verdict]]:
    with tempfile.TemporaryDirectory() as folder:
        runs = ranks.run(run_designs, nproc=nproc, args=(names, folder), timeout_s=120, env=RECORDER)
    return {name: judge(runs, name) for name in names}


FEW = ["plain", "gan", "local_sgd", "server_around_ddp", "one_batch", "rank_0_works_more", "ema_on_rank_0"]


def test_a_few_healthy_designs_get_no_word(ranks: Any) -> None:
    said = run_and_judge(ranks, FEW)
    assert {name: [one.headline for one in some] for name, some in said.items() if some} == {}


@pytest.mark.slow
@pytest.mark.parametrize("nproc", [2, 4])
def test_healthy_designs_get_no_word(ranks: Any, nproc: int) -> None:
    # Two ranks only: their stages.
    names = [name for name in HEALTHY if nproc == 2 or name != "model_parallel"]
    said = run_and_judge(ranks, names, nproc)
    assert {name: [one.headline for one in some] for name, some in said.items() if some} == {}


@pytest.mark.parametrize(
    "names",
    [FIRST, pytest.param([name for name in PLANTED if name not in FIRST], marks=pytest.mark.slow)],
    ids=["first", "others"],
)
def test_mistakes_are_named_with_their_line(ranks: Any, names: list[str]) -> None:
    said = run_and_judge(ranks, names)
    wrong = {}
    for name in names:
        _, code, line = PLANTED[name]
        codes = [one.code for one in said[name]]
        if codes != [code]:
            wrong[name] = [f"{one.code} {one.headline}" for one in said[name]]
        elif not any(line in frame.text for frame in said[name][0].places[0].frames):
            wrong[name] = [str(said[name][0].places[0].frames)]
    assert wrong == {}


def test_advice_is_given_to_those_who_ask(ranks: Any) -> None:
    said = run_and_judge(ranks, list(ADVISED))
    for name, (_, code, words) in ADVISED.items():
        assert any(one.code == code and words in one.headline for one in said[name]), said[name]


def test_facts_of_other_events_are_not_compared() -> None:
    one = Fact("batches", "a", (0, 1), 3, BATCHES)
    other = Fact("batches", "b", (0, 1), 3, BATCHES)
    book = FactBook(RULES)
    book.note_own(0, [one])
    book.note(1, [other])  # of another node
    assert book.read() == []
    book.note(1, [one])
    assert [verdict.code for verdict in book.read()] == ["PL020"]
    assert book.read() == []


def test_facts_reach_other_nodes_and_one_node_reports() -> None:
    facts = {rank: Fact("batches", "a", (0, 1), 3, BATCHES) for rank in (0, 1)}
    books = {rank: FactBook(RULES) for rank in facts}
    for rank, book in books.items():
        book.note_own(rank, [facts[rank]])
    states = {
        rank: from_json(NodeState, to_json(NodeState("n", (rank,), STILL, facts=tuple(book.recent))))
        for rank, book in books.items()
    }
    for rank, book in books.items():
        for other, fact in states[1 - rank].facts:
            book.note(other, [fact])
    assert [verdict.code for verdict in books[0].read()] == ["PL020"]
    assert books[1].read() == []


@pytest.mark.parametrize(
    ("ranks", "words"), [((1,), "has weights of its own"), ((0, 1), "have weights of their own")]
)
def test_several_ranks_are_a_plural(ranks: tuple[int, ...], words: str) -> None:
    place = explain(Proof("PL826", "the weights differ", ranks, (), "has weights of its own")).places[0]
    assert place.what == words
