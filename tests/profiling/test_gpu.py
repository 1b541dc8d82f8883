"""Traces of GPUs, in the form of HolisticTraceAnalysis' test data: idleness and its cause, copies, names."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from paceline.cli.main import main
from paceline.profiling.analysis import Profile, RankStep, analyse
from paceline.profiling.read import read_traces

START_US = 1_682_725_898_237_042  # as in that data: a time of day, not a distance from a base
CUDA, NCCL = (
    "void at::native::vectorized_elementwise_kernel<4>",
    "ncclKernel_{}_RING_LL_Sum_float(ncclWorkElem)",
)
Span = tuple[str, str, float, float]


def write(path: Path, spans: Iterable[Span], *, args: dict[str, Any] | None = None) -> Profile:
    """Write spans of category, name, begin and end in ms as one rank's trace, and return its profile."""
    events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "python"}}]
    for number, (category, name, begin, end) in enumerate(spans):
        on_device = category in ("kernel", "gpu_memcpy", "gpu_memset")
        stream = 20 if name.startswith("nccl") else 7
        own = {"device": 0, "stream": stream, "correlation": number, **(args or {})} if on_device else {}
        times = {"ts": START_US + round(1e3 * begin), "dur": round(1e3 * end) - round(1e3 * begin)}
        place = (0, f"stream {stream}") if on_device else (3, 17)
        events.append(
            {"ph": "X", "cat": category, "name": name, "pid": place[0], "tid": place[1], "args": own, **times}
        )
    info = {"backend": "nccl", "rank": 0, "world_size": 2}
    path.write_text(json.dumps({"schemaVersion": 1, "distributedInfo": info, "traceEvents": events}))
    return analyse(read_traces([path]))


def step(number: int, begin: float, end: float) -> list[Span]:
    """Return a step of the host alone: forward, backward and the optimizer take all of it."""
    third = (end - begin) / 3
    middle, last = begin + third, begin + 2 * third
    return [
        ("user_annotation", f"ProfilerStep#{number}", begin, end),
        ("cpu_op", "aten::linear", begin, middle),
        ("cpu_op", "autograd::engine::evaluate_function: AddmmBackward0", middle, last),
        ("user_annotation", "Optimizer.step#SGD.step", last, end),
    ]


def only(profile: Profile) -> RankStep:
    (row,) = profile.rows
    return row


def test_an_idle_gpu_is_not_called_well_hidden(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A step of 222 ms with 38.6 of kernels, 13.2 exposed and 2.65 of copies."""
    spans = step(5, 0, 222)
    for number in range(100):  # short kernels, 2 ms apart
        begin = 2 * number
        spans.append(("kernel", CUDA, begin, begin + 0.386))
    spans.append(("kernel", NCCL.format("AllReduce"), 201, 214.2))
    spans.append(("gpu_memcpy", "Memcpy HtoD (Pageable -> Device)", 216, 218))
    spans.append(("gpu_memset", "Memset (Device)", 219, 219.65))
    row = only(write(tmp_path / "rank-0.json", spans))
    assert (row.compute_ns, row.exposed_ns, row.copies_ns) == (38_600_000, 13_200_000, 2_650_000)
    assert row.idle_ns == 222_000_000 - 38_600_000 - 13_200_000 - 2_650_000
    assert row.idle["launches"] == row.idle_ns
    assert row.num_kernels == 100
    assert main(["profile", "read", str(tmp_path)]) == 1
    text = capsys.readouterr().out
    assert "hidden well enough" not in text
    assert "its GPU is idle for 75% of the step" in text
    assert "[PL909]" in text
    assert "100 kernels per step, 386 us each" in text.replace("µ", "u")
    head, own = (line.split() for line in text.splitlines()[2:4])
    assert dict(zip(head[-2:], own[-2:], strict=True)) == {"copies": "2.6", "idle": "168"}


CAUSES: dict[str, list[Span]] = {
    "synchronisation": [("cuda_runtime", "cudaStreamSynchronize", 20, 50.01)],
    "data": [("user_annotation", "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", 48, 81)],
    "launches": [],
}


@pytest.mark.parametrize("cause", CAUSES)
def test_the_cause_of_a_gap_follows_from_the_host(tmp_path: Path, cause: str) -> None:
    """Kernels run until 50 ms and from 80 ms on."""
    spans = [*step(5, 0, 100), ("kernel", CUDA, 0, 50), ("kernel", CUDA, 80, 100), *CAUSES[cause]]
    row = only(write(tmp_path / "rank-0.json", spans))
    assert {name: length for name, length in row.idle.items() if length} == {cause: 30_000_000}


def test_python_between_the_phases_leaves_the_gpu_idle(tmp_path: Path) -> None:
    spans = [*step(5, 0, 60), ("user_annotation", "ProfilerStep#6", 60, 100), ("kernel", CUDA, 0, 70)]
    profile = write(tmp_path / "rank-0.json", spans)
    assert profile.rows[1].idle["other code"] == 30_000_000
    assert not profile.rows[0].idle_ns


def test_a_busy_gpu_has_no_finding(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "rank-0.json", [*step(5, 0, 100), ("kernel", CUDA, 0, 95)])
    assert main(["profile", "read", str(tmp_path)]) == 0
    assert "hidden well enough" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("kernel", "operation"),
    [
        ("ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclWorkElem)", "send/recv"),
        ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", "send/recv"),
        ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "all_gather"),
        ("ncclKernel_ReduceScatter_RING_SIMPLE_Sum_half(ncclWorkElem)", "reduce_scatter"),
    ],
)
def test_kernels_of_nccl_without_a_group_have_their_operation(
    tmp_path: Path, kernel: str, operation: str
) -> None:
    row = only(
        write(tmp_path / "rank-0.json", [*step(5, 0, 9), ("kernel", CUDA, 0, 1), ("kernel", kernel, 2, 3)])
    )
    assert [each.operation for each in row.traffic] == [operation]
