"""Reading traces: what torch.profiler writes on CPU and CUDA, and what is damaged, foreign or hostile."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.cli.main import main
from paceline.errors import PacelineError
from paceline.profiling.analysis import analyse
from paceline.profiling.assembly import move_trace
from paceline.profiling.rank_trace import BACKWARD, DATA, FORWARD, OPTIMIZER, PHASES, RankTrace
from paceline.profiling.read import align, read_traces
from tests.profiling.chrome import BASE_NS, as_table, event, write
from tests.profiling.timelines import MS, simulate


def job(num_steps: int = 3) -> list[RankTrace]:
    return simulate(2, num_steps, late={1: (DATA, 40 * MS)})


def test_a_cpu_trace_is_read(tmp_path: Path) -> None:
    """Files without marks, groups or numbers give the same times, up to the thread that begins late."""
    made = job()
    read = read_traces(write(tmp_path, made))
    expected, found = analyse(made), analyse(read)
    assert [(b.rank, b.phase) for b in found.blames] == [(1, DATA)]
    for own, other in zip(made, read, strict=True):
        assert other.rank == own.rank
        for phase in PHASES:
            spans = own.phases.get(phase)
            if spans is not None:
                assert np.abs(other.phases[phase] - BASE_NS - spans).max() <= 1000, phase
        assert [part.issued_ns - BASE_NS for part in other.collectives] == [
            part.issued_ns for part in own.collectives
        ]
        assert {part.num_bytes for part in other.collectives} == {400}
    for row, same in zip(found.rows[1:], expected.rows[1:], strict=True):
        assert row.exposed_ns == pytest.approx(same.exposed_ns, abs=20_000)
        assert sum(row.waiting_ns.values()) == pytest.approx(sum(same.waiting_ns.values()), abs=20_000)


def test_a_cuda_trace_is_read_from_its_kernels(tmp_path: Path) -> None:
    made = job()
    read = read_traces(write(tmp_path, made, cuda=True))
    for own, other in zip(made, read, strict=True):
        assert (other.compute - BASE_NS).tolist() == own.compute.tolist()
        assert {(part.operation, part.group, part.num_bytes) for part in other.collectives} == {
            ("all_reduce", "0", 400)
        }
    profile, expected = analyse(read), analyse(made)
    assert profile.num_matched == expected.num_matched
    assert profile.rows[4].exposed_ns == expected.rows[4].exposed_ns


def test_one_rank_alone_does_not_know_what_it_waits_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (path,) = write(tmp_path, job()[:1])
    assert main(["profile", "read", str(path)]) == 1
    text = capsys.readouterr().out
    assert "how much of it is waiting for other ranks is not known" in text
    assert "No trace of rank 1" in text


def test_a_folder_and_gzip_are_read(tmp_path: Path) -> None:
    for path in write(tmp_path, job()):
        (tmp_path / f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
    (tmp_path / "notes.txt").write_text("not a trace")
    assert [trace.rank for trace in read_traces([tmp_path])] == [0, 1]


def test_steps_of_a_schedule_keep_their_numbers(tmp_path: Path) -> None:
    (path,) = write(tmp_path, job()[:1])
    table = json.loads(path.read_text())
    table["traceEvents"] += [
        event("user_annotation", f"ProfilerStep#{number}", 10, (number * MS, (number + 1) * MS))
        for number in (7, 8)
    ]
    path.write_text(json.dumps(table))
    (trace,) = read_traces([path])
    assert [step.number for step in trace.steps] == [7, 8]


def test_reading_values_is_a_phase(tmp_path: Path) -> None:
    (path,) = write(tmp_path, job()[:1])
    table = json.loads(path.read_text())
    table["traceEvents"] = [
        event("cpu_op", "aten::addmm", 1, (0, 100_000)),
        *(event("cpu_op", "aten::item", 1, (t, t + 2000)) for t in range(200_000, 300_000, 5000)),
        event("cpu_op", "aten::addmm", 1, (300_000, 390_000)),
        event("user_annotation", "Optimizer.step#SGD.step", 1, (400_000, 500_000)),
        event("kernel", "gemm", 7, (10_000, 90_000)),
        event("cpu_op", "autograd::engine::evaluate_function: AddmmBackward0", 1, (390_000, 400_000)),
    ]
    path.write_text(json.dumps(table))
    (row,) = analyse(read_traces([path])).rows
    assert row.phases["reading values"] == 97_000
    assert row.phases[FORWARD] == 390_000 - 97_000
    assert row.phases[OPTIMIZER] == 100_000


def test_clocks_that_differ_are_moved_within_a_bound(tmp_path: Path) -> None:
    first, other = job(5)
    paths = write(tmp_path, [first])
    paths += write(tmp_path, [move_trace(other, 2_000 * MS)], host_name="b")
    read = read_traces(paths)
    moved = read[1].steps[0].begin_ns - read[0].steps[0].begin_ns
    assert abs(moved) <= read[1].clock_error_ns <= 30 * MS
    assert "is ahead of that of rank 0 by" in read[1].remarks[-1]


def test_missing_ranks_and_other_lengths_are_remarked(tmp_path: Path) -> None:
    traces = [replace(trace, world_size=4) for trace in job()]
    traces[1] = replace(traces[1], phases={**traces[1].phases, OPTIMIZER: traces[1].phases[OPTIMIZER][:2]})
    profile = analyse(read_traces(write(tmp_path, traces)))
    assert profile.steps == (1, 2)
    assert any("No trace of ranks 2 and 3" in remark for remark in profile.remarks)
    assert any("different numbers of steps (rank 0 3, rank 1 2)" in remark for remark in profile.remarks)


def table_of(events: Any, **more: Any) -> bytes:
    return json.dumps({**as_table(job(1)[0], traceEvents=events), **more}).encode()


DAMAGED: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "it is empty"),
    "blank": (b" \n ", "it is empty"),
    "torn": (b'{"traceEvents": [{"ph": "X", "name": "a', "cut off"),
    "torn gzip": (gzip.compress(b'{"traceEvents": []}' * 100)[:-20], "gzip is damaged"),
    "not UTF-8": (b'{"traceEvents": [{"name": "\xff\xfe"}]}', "UTF-8|cut off"),
    "binary": (b"\x00\x01\x02", "cut off or not the JSON"),
    "a picture": (b"\x89PNG\r\n", "cut off or not the JSON"),
    "a number": (b"7", "not the JSON of a trace"),
    "another JSON": (b'{"model": 1}', "traceEvents"),
    "no events": (b'{"traceEvents": 5}', "traceEvents"),
    "events of another kind": (b'{"traceEvents": [1, 2]}', "traceEvents"),
    "a name that is none": (b'{"traceEvents": [{"ph": "X", "name": [1]}]}', "name"),
    "endless": (table_of([event("kernel", "k", 1, (0, 1)) | {"ts": 1e308}]), "beyond all years"),
    "backwards": (table_of([event("kernel", "k", 1, (5, 1))]), "negative duration"),
    "a base of 80 bits": (table_of([], baseTimeNanoseconds=2**80), "years|Integer|integer|int"),
    "deep": (b'{"x": ' + b"[" * 200_000 + b"]" * 200_000 + b', "traceEvents": []}', "deeply|cut off"),
    "a table of ours": (table_of([], paceline={"steps": "all"}), "steps"),
    "numbers of ours": (
        table_of([event("kernel", "k", 1, (0, 1))], paceline={"steps": [[1, 0, 2**70]], "calls": []}),
        "64 bits|out of range|cut off",
    ),
}


@pytest.mark.parametrize(("data", "reason"), DAMAGED.values(), ids=DAMAGED.keys())
def test_a_file_that_is_no_trace_is_one_message(
    data: bytes, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rank-0.json"
    path.write_bytes(data)
    with pytest.raises(PacelineError, match=reason) as caught:
        analyse(read_traces([path]))
    assert caught.value.code == "PL900"
    assert str(path) in caught.value.saw
    assert main(["profile", "read", str(path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_other_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PacelineError, match=r"No such file.*\[PL900\]"):
        read_traces([tmp_path / "nothing.json"])
    with pytest.raises(PacelineError, match=r"no file that ends in .json.*\[PL900\]"):
        read_traces([tmp_path])
    first, second = write(tmp_path, job())
    with pytest.raises(PacelineError, match=r"the same rank as .*worker0.json: 0.*\[PL902\]"):
        read_traces([first, second, first])
    for path in (first, second):
        path.write_text(json.dumps({"traceEvents": json.loads(path.read_text())["traceEvents"]}))
    with pytest.raises(PacelineError, match=r"no rank, neither.*\[PL902\]"):
        read_traces([first, second])


def test_traces_of_two_runs_contradict_each_other(tmp_path: Path) -> None:
    first, other = job()
    paths = write(tmp_path, [first, move_trace(other, 3_600_000 * MS)])
    with pytest.raises(PacelineError, match=r"ranks 0 and 1 contradict.*\[PL904\]"):
        read_traces(paths)


def test_without_an_optimizer_step_there_is_one_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (path,) = write(tmp_path, job()[:1])
    table = json.loads(path.read_text())
    table["traceEvents"] = [e for e in table["traceEvents"] if "Optimizer" not in e["name"]]
    path.write_text(json.dumps(table))
    assert main(["profile", "read", str(path)]) == 2
    assert "the trace of rank 0 has no step" in (error := capsys.readouterr().err)
    assert error.rstrip().endswith("[PL903]")


@pytest.mark.parametrize("is_cut", [False, True])
def test_two_optimizers_of_one_class_end_one_step(tmp_path: Path, is_cut: bool) -> None:
    """torch gives both one name; a recording may end between them."""
    (path,) = write(tmp_path, job()[:1])
    usual = len(read_traces([path])[0].steps)
    table = json.loads(path.read_text())
    firsts = [e for e in table["traceEvents"] if "Optimizer" in e["name"]]
    for first in firsts:
        first["dur"] -= 5
    seconds = [e | {"ts": e["ts"] + e["dur"] + 1, "dur": 1} for e in firsts]
    table["traceEvents"] += seconds[: -1 if is_cut else None]
    path.write_text(json.dumps(table))
    steps = read_traces([path])[0].steps
    assert len(steps) == usual - is_cut
    ends = [BASE_NS + round(1e3 * (e["ts"] + e["dur"])) for e in seconds]
    assert [step.end_ns for step in steps] == pytest.approx(ends[: len(steps)], abs=1000)


def test_msgspec_is_only_needed_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "msgspec", None)
    with pytest.raises(PacelineError, match=r"pip install 'paceline\[profile\]'.*\[PL901\]"):
        read_traces(write(tmp_path, job()))


def test_the_report_names_the_late_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [str(path) for path in write(tmp_path, job())]
    assert main(["profile", "read", *paths]) == 1
    text = capsys.readouterr().out
    assert "ranks 0 and 1 of 2, steps 1 to 3: 77." in text
    assert "rank 1: rank 0 waited 39" in text
    assert "took longer in its data loader." in text
    assert "Speed up rank 1 first (PL913). [PL910]" in text
    assert main(["profile", "read", *paths, "--json"]) == 1
    table = json.loads(capsys.readouterr().out)
    assert table["blames"][0]["phase"] == DATA
    assert table["findings"][0]["code"] == "PL913"
    assert 0.5 < table["exposed_share"] < 0.6
    assert table["rows"][0]["phases"][BACKWARD] > 0


def test_spans_find_their_calls_by_size(tmp_path: Path) -> None:
    """gloo's threads noted the begin of the second call first; both are all-reduces, of other sizes."""
    spans = {(30_000, 90_000): 7, (31_000, 50_000): 100}
    events = [
        event(
            "user_annotation", "gloo:all_reduce", 1, span, **{"Input Dims": [[size]], "Input type": ["float"]}
        )
        for span, size in spans.items()
    ]
    calls = [[BASE_NS + 10_000, "0", 1, "all_reduce", 400], [BASE_NS + 20_000, "0", 2, "all_reduce", 28]]
    recorded = {
        "steps": [[1, BASE_NS, BASE_NS + 100_000]],
        "calls": calls,
        "places": [["/job/train.py", 3, "main", ""]],
        "call_places": [0, -1],
    }
    (tmp_path / "rank-0.json").write_text(
        json.dumps({"traceEvents": events, "baseTimeNanoseconds": BASE_NS, "paceline": recorded})
    )
    (trace,) = read_traces([tmp_path])
    found = [(part.number, part.issued_ns - BASE_NS, part.end_ns - BASE_NS) for part in trace.collectives]
    assert found == [(1, 10_000, 50_000), (2, 20_000, 90_000)]
    assert [part.at for part in trace.collectives] == ["/job/train.py:3 in main", ""]


def test_a_few_contradictions_are_left_out() -> None:
    first, other = (replace(trace, host="a") for trace in simulate(2, 20))
    parts = list(other.collectives)
    late = first.collectives[7].end_ns + 50 * MS
    parts[7] = replace(parts[7], issued_ns=late, end_ns=late + MS)
    aligned = align([first, replace(other, collectives=tuple(parts))])
    profile = analyse(aligned)
    assert profile.num_matched == len(parts) - 1
    assert (
        "The times of 1 of 40 collectives contradict each other: these are not compared." in profile.remarks
    )
    assert profile.blames == ()


def test_cuda_graphs_are_remarked(tmp_path: Path) -> None:
    """Their kernels have no operators, and NCCL's in them no group: what is then unknown is stated."""
    made = job()
    paths = write(tmp_path, made, cuda=True)
    for path in paths:
        table = json.loads(path.read_text())
        events = [e for e in table["traceEvents"] if e["cat"] != "cpu_op"]
        for each in events:
            if each["name"].startswith("nccl"):
                each["args"] = {"graph id": 1, "graph node id": 7}
        for step in made[0].steps:
            events.append(
                event("cuda_runtime", "cudaGraphLaunch", 10, (step.begin_ns + MS, step.begin_ns + 2 * MS))
            )
        path.write_text(json.dumps({**table, "traceEvents": events}))
    read = read_traces(paths)
    profile = analyse(read)
    for own, other in zip(made, read, strict=True):
        assert (other.compute - BASE_NS).tolist() == own.compute.tolist()
    assert any("CUDA graphs were replayed" in remark for remark in profile.remarks)
    assert any("do not name their group" in remark for remark in profile.remarks)
    assert profile.num_matched == 0
    assert profile.blames == ()
    assert profile.rows[0].exposed_ns > 0


def write_calls(folder: Path, rank: int, calls: list[tuple[str, int]], members: dict[str, list[int]]) -> None:
    """Write a recording of a rank with one all-reduce per millisecond, each in a group and with a number."""
    at = [MS * (place + 1) for place in range(len(calls))]
    sizes = {"Input Dims": [[7]], "Input type": ["float"]}
    table = {
        "traceEvents": [
            event("user_annotation", "gloo:all_reduce", 1, (t + 10, t + 1000), **sizes) for t in at
        ],
        "baseTimeNanoseconds": BASE_NS,
        "distributedInfo": {"rank": rank, "world_size": 4},
        "paceline": {
            "steps": [[1, BASE_NS, BASE_NS + 100 * MS]],
            "calls": [[BASE_NS + t, *call, "all_reduce", 28] for t, call in zip(at, calls, strict=True)],
            "members": members,
            "host": "a",
        },
    }
    (folder / f"rank-{rank}.json").write_text(json.dumps(table))


def test_groups_of_one_name_are_told_apart_by_their_members(tmp_path: Path) -> None:
    for rank in range(4):
        members = {"0": [0, 1, 2, 3], "1": [0, 1] if rank < 2 else [2, 3]}
        write_calls(tmp_path, rank, [("0", 1), ("1", 1), ("1", 2)], members)
    traces = read_traces([tmp_path])
    groups = [{part.group for part in trace.collectives} for trace in traces]
    assert groups == [{"0", "1 of ranks 0 and 1"}] * 2 + [{"0", "1 of ranks 2 and 3"}] * 2
    assert analyse(traces).num_matched == 5


def test_a_group_that_is_made_again_counts_from_the_first_collective(tmp_path: Path) -> None:
    for rank in range(2):
        write_calls(tmp_path, rank, [("0", 1), ("0", 2), ("0", 1), ("0", 2), ("0", 3)], {})
    traces = read_traces([tmp_path])
    assert [part.group for part in traces[0].collectives] == ["0"] * 2 + ["0, made again (1)"] * 3
    profile = analyse(traces)
    assert (profile.num_matched, profile.num_unmatched) == (5, 0)
