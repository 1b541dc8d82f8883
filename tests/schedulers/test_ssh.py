"""`paceline launch ssh`: one launcher per node, every word as it is, and the code of the first failure."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from paceline.errors import PacelineError
from paceline.schedulers.ssh import SshJob, read_hosts, render_ssh
from paceline.schedulers.target import Target

# In place of ssh: drops the options and the host, and runs the command in a shell, as sshd does.
FAKE = """#!/bin/sh
while [ "${1#-}" != "$1" ]; do [ "$1" = -o ] && shift; shift; done
export HOST=$1; shift
exec sh -c "$*"
"""
# In place of `python -m paceline run ...`: prints what it got.
SHOW = """#!/bin/sh
printf '%s\\n' "$HOST" "$PWD" "$NCCL_DEBUG" "$@"
[ "$HOST" = bad ] && exit 3
[ "$HOST" = slow ] && exec sleep 60
exit 0
"""


def render(tmp_path: Path, hosts: list[str], **more: str) -> Path:
    folder = tmp_path / "a folder's name"
    folder.mkdir()
    job = SshJob(
        target=Target("train.py", ("--text", 'it\'s $HOME "two words"')),
        hosts=",".join(hosts),
        nproc_per_node=2,
        name="job",
        port=29400,
        workdir=str(folder),
        grace_s=5,
    )
    for name, text in (("ssh", FAKE), ("show", SHOW)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    text = render_ssh(job, hosts, {"NCCL_DEBUG": "a b", "SECRET": "no", "HF_TOKEN": "no", **more})
    assert "SECRET" not in text
    assert "TOKEN" not in text
    path = tmp_path / "job.sh"
    path.write_text(text.replace(sys.executable, str(tmp_path / "show")))
    return path


def environment(tmp_path: Path) -> dict[str, str]:
    return {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}


def test_each_node_gets_every_word_as_it_is(tmp_path: Path) -> None:
    path = render(tmp_path, ["me@one", "two"])
    done = subprocess.run(
        ["bash", str(path)], env=environment(tmp_path), capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    for host in ("me@one", "two"):
        lines = [line.removeprefix(f"[{host}] ") for line in done.stdout.splitlines() if f"[{host}]" in line]
        assert lines[:3] == [host, str(tmp_path / "a folder's name"), "a b"]
        assert lines[3:5] == ["-m", "paceline"]
        assert lines[lines.index("--rdzv-endpoint") + 1] == "one:29400"
        assert lines[-3:] == ["train.py", "--text", 'it\'s $HOME "two words"']


def test_the_code_of_a_failed_node_is_returned(tmp_path: Path) -> None:
    path = render(tmp_path, ["good", "bad"])
    done = subprocess.run(["bash", str(path)], env=environment(tmp_path), capture_output=True, timeout=60)
    assert done.returncode == 3


def test_a_signal_ends_the_sessions(tmp_path: Path) -> None:
    path = render(tmp_path, ["slow"])
    job = subprocess.Popen(["bash", str(path)], env=environment(tmp_path), stdout=subprocess.PIPE, text=True)
    assert job.stdout is not None
    assert "slow" in job.stdout.readline()
    time.sleep(0.2)  # the trap is set right after the start of the last node
    job.send_signal(signal.SIGTERM)
    assert job.wait(30) != 0
    job.stdout.close()


def test_host_files(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("# the cluster\nnode0 slots=8\nme@10.0.0.7 slots=8  # spare\n\n")
    assert read_hosts(str(path)) == (["node0", "me@10.0.0.7"], 8)
    assert read_hosts("a,b") == (["a", "b"], None)


@pytest.mark.parametrize(
    "text",
    ["", "a slots=0", "a slots=8\nb slots=4", "a\na", "-oProxyCommand=x", "a b", "a;b", "a slots=8\nb"],
)
def test_wrong_host_files(tmp_path: Path, text: str) -> None:
    path = tmp_path / "hosts"
    path.write_text(text)
    with pytest.raises(PacelineError) as caught:
        read_hosts(str(path))
    assert caught.value.code == "PL847"
