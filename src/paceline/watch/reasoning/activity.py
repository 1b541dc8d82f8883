"""Recognises from its stack what a thread does that is in no collective."""

from __future__ import annotations

import re
from collections.abc import Sequence

from paceline.watch.protocol.report import Frame
from paceline.watch.protocol.words import own_frames
from paceline.watch.reasoning.source import Source

# For the innermost frames, in order of precedence: a pattern of the file, its functions (empty: any), and
# what the thread does. The loader comes first, because it waits in queues and pipes itself.
_BY_FRAME: tuple[tuple[str, str, str], ...] = (
    (r"/torch/utils/data/", "", "waits for the data loader"),
    (r"/torch/_(inductor|dynamo|functorch)/", "", "compiles (torch.compile)"),
    (
        r"/subprocess\.py$",
        "wait _wait _try_wait communicate _communicate run call",
        "waits for a program that it has started (subprocess)",
    ),
    (r"/queue\.py$|/multiprocessing/queues\.py$", "get put join", "waits for a queue"),
    (
        r"/multiprocessing/(process|popen_\w+|pool)\.py$",
        "join wait poll get",
        "waits for a process that it has started",
    ),
    (r"/concurrent/futures/", "result wait as_completed shutdown", "waits for a task of an executor"),
    (
        r"/(http/client|urllib/request|ssl|socket|socketserver)\.py$|/(urllib3|requests|httpx|botocore|aiohttp)/",
        "",
        "waits for the network",
    ),
    (r"/threading\.py$", "join _wait_for_tstate_lock _shutdown _join", "waits for a thread to end"),
    (r"/threading\.py$", "wait acquire wait_for __enter__", "waits for a lock or an event"),
    (
        r"/(multiprocessing/synchronize|filelock/\S+|fasteners/\S+|portalocker/\S+)\.py$",
        "",
        "waits for a lock",
    ),
    (r"/multiprocessing/connection\.py$", "", "waits for a pipe from another process"),
    (r"/selectors\.py$|/asyncio/", "", "waits for a file or a socket"),
    (r"/(pdb|bdb)\.py$", "", "is in the debugger (pdb)"),
)
# C functions have no frame: only the text of the line that calls them shows them. For innermost frames.
_BY_TEXT: tuple[tuple[str, str], ...] = (
    (r"\b(time|_time|trio|gevent)\.sleep\(|(?<![\w.])sleep\(", "is asleep in time.sleep"),
    (r"\bsleep\(", "is asleep"),
    (r"\binput\(|\bgetpass\(", "waits for input"),
    (r"\.acquire\(|^(async )?with .*lock", "waits for a lock"),
    (r"\bflock\(|\blockf\(", "waits for a file's lock"),
    (r"\bos\.(system|popen|wait\w*)\(", "waits for a program that it has started"),
    (r"\b(select|poll)\(|signal\.(pause|sigwait)\(", "waits for an event"),
    (r"\.(recv|recv_into|accept|connect)\(", "waits for a socket"),
    (r"\.get\(\)|\.get\((block|timeout)", "waits for a queue"),
)
# Such a line copies a GPU's numbers to Python, and so waits for the collectives before it.
_SYNCHRONIZES = re.compile(r"\.(item|cpu|tolist|numpy|synchronize|wait|to|result)\(|\bprint\(|\bfloat\(")
_DISTRIBUTED = "/torch/distributed/"
# The files of torch.distributed in which a thread waits for others. In others, such as its checkpoints, it
# may work.
_WAITS_ITSELF = re.compile(r"/torch/distributed/(distributed_c10d|rendezvous|device_mesh|c10d_\w+)\.py$")
# The number of innermost frames that are searched for a library's wait.
_INNERMOST = 8
_BUILDERS = {"new_group", "_new_group_with_tag", "new_subgroups", "split_group", "init_device_mesh"}
_BUILDERS |= {"new_subgroups_by_enumeration", "shrink_group"}


def find_activity(frames: Sequence[Frame], source: Source) -> str | None:
    """Return what delays a thread outside of torch.distributed, such as `is asleep in time.sleep`.

    Args:
        frames: innermost first.
        source: supplies the text of lines that have none.
    """
    if not frames:
        return None
    innermost = frames[0]
    text = innermost.text or source.line(innermost.file, innermost.line)
    asleep = next((words for pattern, words in _BY_TEXT if re.search(pattern, text)), None)
    is_users = own_frames(frames)[:1] == (innermost,)
    if asleep is not None and is_users:
        return asleep
    # Frames of a library count up to the first one of the user's.
    for pattern, functions, words in _BY_FRAME:
        for frame in frames[:_INNERMOST]:
            if own_frames((frame,)):
                break
            if re.search(pattern, frame.file) and (not functions or frame.function in functions.split()):
                return words
    return asleep


def find_building(frames: Sequence[Frame]) -> str | None:
    """Return the function in which a thread makes a process group, as the user called it; else `None`."""
    found = [f.function for f in frames if _DISTRIBUTED in f.file and f.function in _BUILDERS]
    return found[-1].replace("_new_group_with_tag", "new_group") if found else None


def is_joining(frames: Sequence[Frame]) -> bool:
    """Return whether a thread is in `init_process_group`."""
    return any(_DISTRIBUTED in f.file and f.function == "init_process_group" for f in frames)


def find_distributed(frames: Sequence[Frame]) -> str | None:
    """Return the function of torch.distributed that the user called and that itself waits; else `None`."""
    found = None
    if not frames or not _WAITS_ITSELF.search(frames[0].file):
        return None
    for frame in frames:
        if own_frames((frame,)):
            break
        if _DISTRIBUTED in frame.file and not frame.function.startswith(("_", "wrapper")):
            found = frame.function
    return found


def is_in_torch(frames: Sequence[Frame]) -> bool:
    """Return whether a thread is in the code of a collective or of backward."""
    return bool(frames) and (
        _DISTRIBUTED in frames[0].file
        or "/torch/autograd/" in frames[0].file
        or "/torch/_ops.py" in frames[0].file
    )


def waits_for_device(frames: Sequence[Frame], source: Source) -> bool:
    """Return whether a thread's line waits for what was issued before."""
    if not frames:
        return False
    return bool(_SYNCHRONIZES.search(frames[0].text or source.line(frames[0].file, frames[0].line)))


def is_bucket(frames: Sequence[Frame]) -> bool:
    """Return whether autograd's engine issued a collective: a bucket of DDP, a hook, or FSDP's gradients."""
    for frame in frames:
        if own_frames((frame,)):
            return False
        if "/torch/autograd/" in frame.file and "backward" in frame.function:
            return True
    return False
