"""A long link between nodes: passes on their frames after a delay, at a limited rate.

Many kernels lack netem, so frames take a way through this process: every node gets a TAP device `wan0` with
the address 10.78.0.<10 + node>. Frames of up to 64 KiB keep it fast enough (TCP segmentation offload).

    python -m tests.launching.wan DELAY_MS RATE_MBIT NAMESPACE...     prints "ready", then runs until killed
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import heapq
import os
import select
import struct
import subprocess
import sys
import time
from pathlib import Path

_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
_TAP, _NO_PI, _VNET_HEADER = 0x0002, 0x1000, 0x4000
_OFFLOADS = 0x01 | 0x02 | 0x04  # checksums, TCP over IPv4 and IPv6 in frames longer than the MTU
_NEWNET = 0x40000000
_HEADER = 10  # bytes of the header that comes before a frame with offloads
_LONGEST = 70_000
_FRAMES_AT_ONCE = 64


def open_device(namespace: str, node: int) -> int:
    """Make `wan0` in a namespace, and return its descriptor, from which its frames are read."""
    libc = ctypes.CDLL(None, use_errno=True)
    home = os.open("/proc/self/ns/net", os.O_RDONLY)
    there = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    try:
        if libc.setns(there, _NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
        device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", b"wan0", _TAP | _NO_PI | _VNET_HEADER))
        fcntl.ioctl(device, _TUNSETOFFLOAD, _OFFLOADS)
        for words in (
            "link set wan0 txqueuelen 5000",
            f"addr add 10.78.0.{10 + node}/24 dev wan0",
            "link set wan0 up",
        ):
            subprocess.run(["ip", *words.split()], check=True)
    finally:
        libc.setns(home, _NEWNET)
        os.close(home)
        os.close(there)
    return device


def relay(devices: list[int], delay_s: float, bytes_per_s: float) -> None:
    """Pass on frames for ever; each node's sends share its rate, and so does what it receives."""
    owner: dict[bytes, int] = {}
    free_s = dict.fromkeys(devices, 0.0)
    arriving_s = dict.fromkeys(devices, 0.0)
    queue: list[tuple[float, int, list[int], bytes]] = []
    count = 0
    while True:
        now = time.monotonic()
        while queue and queue[0][0] <= now:
            _, _, targets, frame = heapq.heappop(queue)
            for target in targets:
                _write(target, frame)
        # Not epoll, which waits for whole milliseconds: that is 125 kB at 1 Gbit/s.
        readable, _, _ = select.select(devices, [], [], max(0.0, queue[0][0] - now) if queue else 0.2)
        for device in readable:
            for _ in range(_FRAMES_AT_ONCE):
                try:
                    frame = os.read(device, _LONGEST)
                except BlockingIOError:
                    break
                owner[frame[_HEADER + 6 : _HEADER + 12]] = device
                frame_s = len(frame) / bytes_per_s
                free_s[device] = max(free_s[device], time.monotonic()) + frame_s
                target = owner.get(frame[_HEADER : _HEADER + 6])
                targets = [target] if target not in (None, device) else [d for d in devices if d != device]
                count += 1
                due_s = free_s[device] + delay_s
                if len(targets) == 1:
                    [receiver] = targets
                    # A receiver that is free passes a frame on while it arrives.
                    due_s = arriving_s[receiver] = max(due_s, arriving_s[receiver] + frame_s)
                heapq.heappush(queue, (due_s, count, targets, frame))  # type: ignore[arg-type]


def _write(device: int, frame: bytes) -> None:
    with contextlib.suppress(OSError):  # lost, as on a full line; TCP sends it again
        os.write(device, frame)


class Wan:
    """The relay's process, from `__enter__` to `__exit__`.

    Args:
        namespaces: of the nodes.
        delay_ms: one way.
        rate_mbit: that a node sends, and receives.
    """

    def __init__(self, namespaces: list[str], delay_ms: float, rate_mbit: float) -> None:
        self._words = [str(delay_ms), str(rate_mbit), *namespaces]
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Wan:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.launching.wan", *self._words],
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
        )
        assert self._process.stdout is not None
        if self._process.stdout.readline().strip() != "ready":
            self.__exit__()
            raise RuntimeError("the relay of the long link did not start")
        return self

    def __exit__(self, *error: object) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


def main(delay_ms: float, rate_mbit: float, namespaces: list[str]) -> None:
    devices = [open_device(name, node) for node, name in enumerate(namespaces)]
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, -15)  # a line does not slow down on a busy machine
    print("ready", flush=True)
    relay(devices, delay_ms / 1e3, rate_mbit * 1e6 / 8)


if __name__ == "__main__":
    main(float(sys.argv[1]), float(sys.argv[2]), sys.argv[3:])
