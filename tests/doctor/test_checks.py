"""Checks of a machine, shown machines that are not at hand: trees of /proc and /sys, recorded programs."""

from __future__ import annotations

import json
import os
import resource
import socket
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest

from paceline.cli.main import main
from paceline.doctor import checks
from paceline.doctor.machine import Checked, Machine

GPU = "0, NVIDIA H100, 0, Not Active, Not Active, 700.00, 700.00, 16, 16, 4, 81559"


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


def programs(**outputs: str) -> Any:
    def run(words: Sequence[str]) -> str | None:
        name = words[0].replace("-", "_")
        if name == "nvidia_smi" and len(words) == 1:
            return outputs.get("head")
        if name == "nvidia_smi" and "driver_version" in words[1]:
            return outputs.get("driver")
        return outputs.get(name)

    return run


def found(check: ModuleType, machine: Machine) -> str:
    checked: Checked = check.check(machine)
    return " | ".join(map(str, checked.findings))


def test_a_healthy_gpu_machine_has_nothing_to_change(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        {
            "sys/bus/pci/devices/0/vendor": "0x10de",
            "sys/bus/pci/devices/0/class": "0x030200",
            "sys/class/infiniband/mlx5_0/ports/1/state": "4: ACTIVE",
            "sys/class/infiniband/mlx5_0/ports/1/rate": "400 Gb/sec (4X NDR)",
            "sys/class/infiniband/mlx5_0/ports/1/counters/symbol_error": "0",
            "proc/meminfo": "MemTotal: 2000000000 kB\nMemAvailable: 1900000000 kB",
            "proc/sys/vm/overcommit_memory": "0",
        },
    )
    machine = Machine(root=root, environ={}, num_ranks=1, run=programs(nvidia_smi=GPU, timedatectl="yes"))
    for check in (checks.gpus, checks.infiniband, checks.memory, checks.clock, checks.leftovers):
        assert found(check, machine) == ""
    assert checks.gpus.check(machine).said.startswith("1 x NVIDIA H100; the kernel's log")
    readable = replace(machine, run=programs(nvidia_smi=GPU, dmesg=""))
    assert checks.gpus.check(readable).said == "1 x NVIDIA H100"
    assert checks.infiniband.check(machine).said.startswith("1 of 1 ports active: 400 Gb/sec")


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (GPU.replace("H100, 0", "H100, 3"), "3 uncorrected memory errors"),
        (GPU.replace("Not Active, Not Active", "Active, Not Active"), "throttled (hw_slowdown)"),
        (GPU.replace("700.00, 700.00", "400.00, 700.00"), "may use 400 W of its 700 W"),
        (GPU.replace("16, 16", "8, 16"), "8 of 16 PCIe lanes"),
        (GPU.replace(", 4, 81559", ", 60000, 81559"), "60000 of 81559 MiB"),
    ],
)
def test_one_bad_gpu_is_named(row: str, expected: str) -> None:
    machine = Machine(environ={}, run=programs(nvidia_smi=f"{GPU}\n1{row[1:]}"))
    text = found(checks.gpus, machine)
    assert expected in text
    assert "GPU 1" in text
    assert "GPU 0" not in text
    assert "PL980" in text


def test_gpus_that_are_missing_hidden_or_logged(tmp_path: Path) -> None:
    files = {f"sys/bus/pci/devices/{i}/vendor": "0x10de" for i in range(2)}
    files |= {f"sys/bus/pci/devices/{i}/class": "0x030200" for i in range(2)}
    log = "[12.3] NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus."
    machine = Machine(
        root=tree(tmp_path, files),
        environ={"CUDA_VISIBLE_DEVICES": ""},
        num_ranks=4,
        run=programs(nvidia_smi=GPU, dmesg=log),
    )
    text = found(checks.gpus, machine)
    for expected in ("2 are on the bus and 1 answer", "VISIBLE_DEVICES is empty", "4 ranks for 1", "Xid 79"):
        assert expected in text


def test_versions_that_do_not_go_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"sys/bus/pci/devices/0/vendor": "0x10de", "sys/bus/pci/devices/0/class": "0x030000"}
    root = tree(tmp_path, files)
    cpu_build = Machine(root=root, environ={}, run=programs(head="CUDA Version: 12.4"))
    monkeypatch.setattr(checks.versions, "_read_cuda", lambda: None)
    assert "built for the CPU" in found(checks.versions, cpu_build)
    monkeypatch.setattr(checks.versions, "_read_cuda", lambda: "13.0")
    assert "built for CUDA 13.0, and the driver knows up to 12.4" in found(checks.versions, cpu_build)
    assert "does not answer" in found(checks.versions, Machine(root=root, environ={}, run=programs()))
    monkeypatch.setattr(checks.versions, "_read_cuda", lambda: "12.8")
    assert found(checks.versions, cpu_build) == ""


@pytest.mark.parametrize(
    ("file", "text", "environ", "expected"),
    [
        ("mlx5_1/ports/1/state", "1: DOWN", {}, "mlx5_1 port 1 is DOWN"),
        ("mlx5_1/ports/1/rate", "100 Gb/sec (4X EDR)", {}, "the ports differ"),
        ("mlx5_1/ports/1/counters/symbol_error", "71", {}, "symbol_error 71 times"),
        ("mlx5_1/ports/1/state", "4: ACTIVE", {"NCCL_IB_DISABLE": "1"}, "NCCL_IB_DISABLE=1"),
    ],
)
def test_infiniband(tmp_path: Path, file: str, text: str, environ: dict[str, str], expected: str) -> None:
    files = {}
    for device in ("mlx5_0", "mlx5_1"):
        files[f"{device}/ports/1/state"] = "4: ACTIVE"
        files[f"{device}/ports/1/rate"] = "400 Gb/sec (4X NDR)"
    root = tree(
        tmp_path, {f"sys/class/infiniband/{name}": value for name, value in {**files, file: text}.items()}
    )
    answer = found(checks.infiniband, Machine(root=root, environ=environ))
    assert expected in answer
    assert answer.count("PL981") == 1


def test_cores_memory_and_quota(tmp_path: Path) -> None:
    cores = len(os.sched_getaffinity(0))
    root = tree(
        tmp_path,
        {
            "sys/fs/cgroup/cpu.max": "50000 100000",
            "sys/fs/cgroup/memory.max": str(1 << 29),
            "proc/meminfo": "MemTotal: 64000000 kB\nMemAvailable: 60000000 kB",
            "proc/sys/vm/overcommit_memory": "2",
        },
    )
    machine = Machine(root=root, environ={}, num_ranks=cores)
    assert f"quota is 0.5 cores, and {cores} are visible" in found(checks.cores, machine)
    assert f"{cores} ranks" in found(checks.cores, machine)
    assert "512.0 MiB for" in found(checks.memory, machine)
    assert "vm.overcommit_memory is 2" in found(checks.memory, machine)
    threads = Machine(root=tmp_path / "none", environ={"OMP_NUM_THREADS": "64"}, num_ranks=2)
    assert "2 ranks with 64 threads each" in found(checks.cores, threads)


@pytest.mark.parametrize(
    ("command", "is_job"),
    [
        ("/usr/bin/python3\0/usr/bin/torchrun\0--nproc-per-node\x008\0train.py", True),
        ("python\0-m\0torch.distributed.run\0train.py", True),
        ("/venv/bin/python\0-u\0-m\0paceline\0train\0recipe.toml", True),
        ("accelerate\0launch\0train.py", True),
        ("grep\0torchrun", False),
        ("python\0-m\0paceline\0doctor", False),
        ("mpirun\0-np\x002\0paceline\0doctor\0--json", False),
        ("paceline\0plan\0recipe.toml", False),
    ],
)
def test_a_running_job_is_named_and_is_no_finding(tmp_path: Path, command: str, is_job: bool) -> None:
    root = tree(tmp_path, {"proc/17/cmdline": command, "proc/meminfo": ""})
    checked: Checked = checks.cores.check(Machine(root=root, environ={}, num_ranks=1))
    assert ("a job runs here (process 17: " in checked.note) is is_job
    assert "/usr" not in checked.note, "the interpreter says nothing"
    assert checked.findings == []


def test_variables(tmp_path: Path) -> None:
    environ = {"NCCL_BLOCKING_WAIT": "1", "CUDA_LAUNCH_BLOCKING": "1", "RANK": "0", "WORLD_SIZE": "2"}
    text = found(checks.leftovers, Machine(root=tmp_path, environ=environ))
    for expected in (
        "PL982",
        "TORCH_NCCL_BLOCKING_WAIT",
        "host waits for every kernel",
        "unset RANK WORLD_SIZE",
    ):
        assert expected in text
    assert "unset RANK" not in found(checks.leftovers, Machine(environ=environ | {"SLURM_JOB_ID": "7"}))
    proxy = Machine(environ={"https_proxy": "http://me:secret@proxy:3128", "EDITOR": "vi"})
    assert checks.leftovers.check(proxy).facts == {"$https_proxy": "http://proxy:3128"}
    bad = Machine(environ={"GLOO_SOCKET_IFNAME": "eth77", "NCCL_SOCKET_IFNAME": "^lo"})
    assert "no interface is called eth77" in found(checks.interfaces, bad)
    assert found(checks.interfaces, Machine(environ={"NCCL_SOCKET_IFNAME": "=lo"})) == ""


def test_three_hundred_interfaces_are_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    one = psutil.net_if_stats()["lo"]
    monkeypatch.setattr(psutil, "net_if_stats", lambda: {f"veth{i}": one for i in range(300)})
    assert len(checks.interfaces.check(Machine(environ={})).said) < 120


def test_a_port_that_is_held_is_named_with_its_holder() -> None:
    with socket.create_server(("", 0)) as held:
        text = found(checks.ports, Machine(environ={}, port=held.getsockname()[1]))
    assert f"held by process {os.getpid()}" in text
    assert "PL978" in text


def test_a_name_that_leads_nowhere_or_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    assert "does not resolve" in found(checks.names, Machine())
    asked = []
    monkeypatch.setattr(socket, "gethostname", lambda: "узел-1")
    monkeypatch.setattr(
        socket,
        "getaddrinfo",
        lambda name, *_, **__: asked.append(name) or [(2, 1, 6, "", ("203.0.113.9", 0))],
    )
    assert "no address of this machine" in found(checks.names, Machine())
    assert asked[0] == "узел-1".encode(), "with IDNA, /etc/hosts would not have it"


def test_disk_shared_memory_and_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "could not be written" in found(checks.disk, Machine(folder=Path("/proc/run")))
    assert found(checks.disk, Machine(folder=tmp_path / "not/there/yet")) == ""
    assert list(tmp_path.iterdir()) == []
    small = os.statvfs_result((4096, 4096, 16384, 100, 100, 50, 10, 10, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda _: small)
    text = found(checks.disk, Machine(folder=tmp_path))
    assert "400.0 KiB are free" in text
    assert "10 files can still be made" in text
    assert "64.0 MiB in all" in found(checks.shared_memory, Machine())
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 4096))
    assert "ulimit -n 4096" in found(checks.limits, Machine(root=tmp_path))


def test_clock() -> None:
    assert "not synchronised" in found(checks.clock, Machine(run=programs(timedatectl="no")))
    assert found(checks.clock, Machine(run=programs(chronyc="Leap status : Normal"))) == ""
    assert found(checks.clock, Machine(run=programs())) == ""


def test_the_command_prints_a_line_per_check(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code = main(["doctor", "--folder", str(tmp_path), "--json"])
    table = json.loads(capsys.readouterr().out)
    names = [row["name"] for row in table["checks"]]
    assert len({*names}) == len(names) == len(checks.CHECKS)
    assert code == int(any(row["findings"] for row in table["checks"]))
    main(["doctor", "--folder", str(tmp_path)])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("this machine")
    assert all(name in line for name, line in zip(names, lines[1:], strict=False))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--nnodes", "0"], "--nnodes 0"),
        (["--nnodes", "2"], "--rdzv-endpoint without the other"),
        (["--rdzv-endpoint", "a"], "--rdzv-endpoint without the other"),
        (["--nnodes", "2", "--rdzv-endpoint", "a:99999"], "a:99999: '99999' is not a port"),
        (["--nproc-per-node", "0"], "--nproc-per-node 0"),
        (["--nnodes", "2", "--rdzv-endpoint", "no-such-host.invalid"], "PL346"),
        (["nowhere.py", "--nnodes", "2", "--rdzv-endpoint", "localhost"], "nowhere.py is no file"),
    ],
)
def test_bad_input(words: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *words]) == 2
    assert expected in capsys.readouterr().err
