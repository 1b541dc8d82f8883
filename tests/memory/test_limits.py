"""The limits of cgroups of both versions, and of the machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.memory import limits
from paceline.memory.limits import Gauge, Use, read_anonymous, read_machine


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


@pytest.fixture
def mount(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(limits, "_MOUNT", tmp_path)
    return tmp_path


def listing(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    whole = Path.read_text

    def read_text(self: Path, *args: object, **kwargs: object) -> str:
        return text if str(self) == "/proc/self/cgroup" else whole(self, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(Path, "read_text", read_text)


def test_version_2_counts_what_the_kernel_cannot_drop(mount: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listing(monkeypatch, "0::/job/step\n")
    write(mount / "job" / "step", memory__max="max\n")
    write(mount / "job", memory__max="1000\n", memory__stat="anon 600\nfile 300\nshmem 50\nanon_thp 9\n")
    assert Gauge().read_group() == Use("cgroup", 1000, 650)


def test_version_1_takes_the_fullest_of_nested_groups(mount: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listing(monkeypatch, "9:cpu:/x\n4:memory:/job/step\n0::/job\n")
    inner, outer = mount / "memory" / "job" / "step", mount / "memory" / "job"
    write(inner, memory__limit_in_bytes="900\n", memory__stat="rss 1\ntotal_rss 300\ntotal_shmem 20\n")
    write(outer, memory__limit_in_bytes="1000\n", memory__stat="total_rss 800\ntotal_shmem 20\n")
    assert Gauge().read_group() == Use("cgroup", 1000, 820)


def test_no_limit_is_none(mount: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listing(monkeypatch, "4:memory:/\n")
    write(mount / "memory", memory__limit_in_bytes="9223372036854771712\n", memory__stat="total_rss 800\n")
    assert Gauge().read_group() is None
    fullest = Gauge().read_fullest()
    assert fullest is not None
    assert fullest.kind == "machine"


def test_a_path_of_the_host_means_the_mount_itself(mount: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listing(monkeypatch, "0::/kubepods/pod1\n")
    write(mount, memory__max="1000\n", memory__stat="anon 10\nshmem 0\n")
    assert Gauge().read_group() == Use("cgroup", 1000, 10)


def test_this_machine_and_process() -> None:
    machine, own = read_machine(), read_anonymous()
    assert 0 < machine.used < machine.limit
    assert own is not None
    assert 0 < own < machine.used
    assert read_anonymous(2**22 + 1) is None
