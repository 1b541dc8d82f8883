"""Meetings of ranks of one machine: each waits until all have come, by one word of memory that they share.

The shared page has three words:

    [ ranks that have come | whether the library takes over | number of meetings that have ended, times two ]

A rank counts itself under a lock of the file. The last one to come sets the first two words back, adds 2 to
the third and wakes the others, which sleep on that word (futex). Without a lock, two ranks could count at the
same time and one be lost, since Python lacks atomic additions. The lock of a file is the kernel's, and ends
with the process that holds it.

A rank that has waited for `_PATIENCE_S` hands the meeting over to the library: it sets the second word and
enters a collective. The others follow, when they come or when their own patience ends. So whatever takes
long is an ordinary collective, with the group's timeout, its errors for ranks that have died, its records of
who is missing, and its place in a profile. A meeting by memory alone has none of these, and needs none: it is
over within 5 ms.
"""

from __future__ import annotations

import ctypes
import fcntl
import itertools
import os
import platform
import sys
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch
import torch.distributed as dist

from paceline.comm.segment import share_file
from paceline.torch_seams.groups import read_timeout_s
from paceline.torch_seams.profiling import is_profiling

_COUNT, _BY_LIBRARY, _ENDED = range(3)
_WORD_BYTES = 4
_PAGE_BYTES = 4096
# Long for ranks that are equally fast, and short beside what a user would call waiting.
_PATIENCE_S = 5e-3
# Asking for the lock without sleeping: a rank holds it for some microseconds, waking up takes fifty.
_LOCK_TRIES = 20
_LOCK_PAUSE_S = 1e-4
# The number of the futex call, by machine (asm/unistd.h); C libraries have no function for it.
_FUTEX_CALLS = {"x86_64": 202, "aarch64": 98, "riscv64": 98}
_FUTEX_WAIT = 0
_FUTEX_WAKE = 1
_ALL = 2**31 - 1


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class MeetingPlace:
    """A place where all ranks of a group meet again and again; they must be processes of one machine.

    All ranks construct it together. Without memory that all of them map, or without futex (other systems
    than Linux, other machines than those listed), every meeting is a collective.

    Args:
        group: the ranks, with a backend for the CPU; no other thread may use it while they meet.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._num_ranks = group.size()
        self._sent = torch.zeros(self._num_ranks, dtype=torch.uint8)
        self._received = torch.empty_like(self._sent)
        self._file = -1
        self._timeout_s = read_timeout_s(group)
        call = _FUTEX_CALLS.get(platform.machine()) if sys.platform == "linux" else None
        shared = None if call is None else share_file(group, _PAGE_BYTES)
        if shared is None:
            return
        self._file, memory = shared
        weakref.finalize(self, os.close, self._file)
        self._words = (ctypes.c_uint32 * 3).from_buffer(memory.numpy().data)
        self._call = call
        self._syscall = ctypes.CDLL(None, use_errno=True).syscall
        self._word = ctypes.c_void_p(ctypes.addressof(self._words) + _ENDED * _WORD_BYTES)

    def meet(self) -> int:
        """Wait until every rank is here; what they wrote before can be read then. Collective.

        Returns:
            The bytes that this rank sent: none unless the library took over.

        Raises:
            RuntimeError: for a rank that has died or did not come within the group's timeout.
        """
        if self._file >= 0 and self._meet_in_memory():
            return 0
        dist.all_to_all_single(self._received, self._sent, group=self._group)
        return self._num_ranks - 1

    def _meet_in_memory(self) -> bool:
        """Meet without messages; return `False` on every rank if the library takes over."""
        words = self._words
        before = words[_ENDED]
        with self._locked():
            if is_profiling(torch):  # A collective is what a profile shows.
                words[_BY_LIBRARY] = 1
            by_library = bool(words[_BY_LIBRARY])
            words[_COUNT] += 1
            is_last = words[_COUNT] == self._num_ranks
            if is_last:
                words[_COUNT] = words[_BY_LIBRARY] = 0
                words[_ENDED] = (before | 1) + 1 + by_library  # The lowest bit says how this meeting ended.
        if is_last:
            self._syscall(self._call, self._word, _FUTEX_WAKE, _ALL)
            return not by_library
        return not by_library and self._await_last(before)

    def _await_last(self, before: int) -> bool:
        """Sleep until the last rank comes, but not for long; return what `_meet_in_memory` does."""
        words, until = self._words, time.monotonic() + _PATIENCE_S
        while (left_s := until - time.monotonic()) > 0:
            # It returns at once if the word is another by now, and early if a signal arrives.
            limit = ctypes.byref(_Timespec(int(left_s), int(left_s % 1 * 1e9)))
            self._syscall(self._call, self._word, _FUTEX_WAIT, before, limit)
            if words[_ENDED] != before:
                return not words[_ENDED] & 1
        with self._locked():
            if words[_ENDED] != before:
                return not words[_ENDED] & 1
            words[_BY_LIBRARY] = 1
        return False

    @contextmanager
    def _locked(self) -> Iterator[None]:
        until = 0.0
        for attempt in itertools.count():
            with suppress(BlockingIOError):
                fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            if attempt >= _LOCK_TRIES:
                # A rank that holds the lock has been interrupted, perhaps for good.
                until = until or time.monotonic() + self._timeout_s
                if time.monotonic() > until:
                    raise RuntimeError(f"Timed out waiting {self._timeout_s:g} s for a rank of this machine.")
                time.sleep(_LOCK_PAUSE_S)
        try:
            yield
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN)
