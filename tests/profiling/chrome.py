"""Writes simulated traces as torch.profiler does: on CPU with gloo, or on CUDA with NCCL's kernels."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from paceline.profiling.rank_trace import BACKWARD, DATA, FORWARD, OPTIMIZER, RankTrace
from tests.profiling.timelines import intersect

BASE_NS = 1_790_000_000_000_000_000
LOOP, POOL, STREAM, NCCL = 10, 11, 7, 20


def event(category: str, name: str, thread: int, span: tuple[int, int], **args: Any) -> dict[str, Any]:
    begin, end = span
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "pid": 1,
        "tid": thread,
        "ts": begin / 1e3,
        "dur": (end - begin) / 1e3,
        "args": args,
    }


def list_events(trace: RankTrace, *, cuda: bool = False) -> list[dict[str, Any]]:
    """Return the events of a rank of `simulate`."""
    found = [event("python_function", "train.py(3): main", LOOP, (0, 10**12))]
    for phase, spans in trace.phases.items():
        for begin, end in spans.tolist():
            whole = begin + 1000, end - 1000
            if phase == DATA:
                name = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
                found.append(event("user_annotation", name, LOOP, (begin, end)))
            elif phase == OPTIMIZER:
                found.append(event("user_annotation", "Optimizer.step#AdamW.step", LOOP, (begin, end)))
                found.append(event("cpu_op", "aten::_fused_adamw_", LOOP, whole))
            elif phase == FORWARD:
                found.append(event("cpu_op", "aten::linear", LOOP, (begin, end)))
                found.append(event("cpu_op", "aten::addmm", LOOP, (begin, end)))
    if cuda:
        for begin, end in trace.compute.tolist():
            found.append(event("kernel", "gemm", STREAM, (begin, end), stream=7))
    else:
        for begin, end in intersect(trace.compute, trace.phases[BACKWARD]).tolist():
            name = "autograd::engine::evaluate_function: AddmmBackward0"
            found.append(event("cpu_op", name, LOOP, (begin, end)))
            found.append(event("cpu_op", "aten::mm", LOOP, (begin, end)))
    for part in trace.collectives:
        span = part.issued_ns, part.end_ns
        if cuda:
            args = {"Collective name": "allreduce", "Process Group Name": "0", "In msg nelems": 100}
            name = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
            found.append(event("kernel", name, NCCL, span, **args, dtype="Float"))
        else:
            found.append(event("cpu_op", "c10d::allreduce_", LOOP + 2, (span[0], span[0] + 100)))
            late = span[0] + min(50_000, span[1] - span[0])
            args = {"Input Dims": [[10, 10]], "Input type": ["float"]}
            found.append(event("user_annotation", "gloo:all_reduce", POOL, (late, span[1]), **args))
    return found


def as_table(trace: RankTrace, **more: Any) -> dict[str, Any]:
    info = {"rank": trace.rank, "world_size": trace.world_size, "backend": "gloo"}
    return {
        "schemaVersion": 1,
        "distributedInfo": info,
        "baseTimeNanoseconds": BASE_NS,
        "host_name": "a",
        **more,
    }


def write(folder: Path, traces: list[RankTrace], *, cuda: bool = False, **more: Any) -> list[Path]:
    """Write a file per rank, and return their paths."""
    paths = []
    for trace in traces:
        paths.append(folder / f"worker{trace.rank}.json")
        table = as_table(trace, traceEvents=list_events(trace, cuda=cuda), **more)
        paths[-1].write_text(json.dumps(table))
    return paths
