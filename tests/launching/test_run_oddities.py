"""`paceline run` on scripts that nobody would write on purpose: one clear message each."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from paceline.errors import PacelineError
from paceline.launching.rank.script import Script, check_script
from tests.launching.launched import Launched, paceline_run

pytestmark = pytest.mark.timeout(100)


def test_a_pipe_is_no_script(tmp_path: Path) -> None:
    """Reading it would wait for a writer."""
    os.mkfifo(tmp_path / "train.py")
    with pytest.raises(PacelineError, match=r"train\.py is not a file but a pipe") as raised:
        check_script(Script(str(tmp_path / "train.py"), (), False))
    assert raised.value.code == "PL340"


def test_a_keyboard_interrupt_of_the_scripts_own_is_its_error(tmp_path: Path) -> None:
    path = tmp_path / "interrupts.py"
    path.write_text("def give_up():\n    raise KeyboardInterrupt\n\n\ngive_up()\n")
    with Launched(tmp_path / "job", paceline_run(str(path))) as job:
        assert job.wait(80) == 1
        assert "rank 0 failed first, at " in job.text
        assert "interrupts.py:2 in give_up: KeyboardInterrupt [PL330]" in job.text
        assert "error_file" not in job.text
        assert "paceline/launch" not in job.text


def test_several_ctrl_c_at_the_start_end_it_without_a_traceback(tmp_path: Path) -> None:
    path = tmp_path / "sleeps.py"
    path.write_text("import time\n\ntime.sleep(60)\n")
    with Launched(tmp_path / "job", paceline_run("--nproc-per-node", "2", str(path))) as job:
        end_s = time.monotonic() + 60
        launcher = psutil.Process(job.process.pid)
        # A shell comes first. Once the launcher has a child, that imports torch.
        while launcher.name() != "paceline" or not launcher.children():
            assert time.monotonic() < end_s
            time.sleep(0.01)
        for _ in range(4):
            job.signal(2)
            time.sleep(0.03)
        assert job.wait(40) == 1, job.text
        assert job.text.rstrip().endswith("stopped by SIGINT.")
        assert not (left := job.find_left(5)), f"left: {left}"


def test_pythoninspect_makes_no_traceback_of_an_exit_code(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import atexit\natexit.register(print, 'at exit')\n")
    good = ["--nproc-per-node", "1", str(tmp_path / "train.py")]
    for words, code in ((["--nproc-per-node", "x", "train.py"], 2), (["--nonsense"], 2), (good, 0)):
        command = [*paceline_run(), *words]
        environ = {**os.environ, "PYTHONINSPECT": "1"}
        done = subprocess.run(
            command,
            env=environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert (done.returncode, "Traceback" in done.stderr) == (code, False), done.stderr
        assert done.stdout == "at exit\n" * (code == 0)


def test_nothing_goes_on_after_a_refused_command(tmp_path: Path) -> None:
    """The process that imports torch for the ranks ends with a command that finds out that it needs none."""
    code = "import paceline.launching.local as launching\nlaunching.warm_up()\n"
    code += "print(launching._keeper[0].keeper_pid, file=open('pid', 'w'))"
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, timeout=60, check=True)
    time.sleep(0.1)
    with suppress(psutil.NoSuchProcess):
        keeper = psutil.Process(int((tmp_path / "pid").read_text()))
        assert keeper.status() == psutil.STATUS_ZOMBIE


FORKS = """
import os, time
if os.fork() == 0:
    os.close(1)
    os.close(2)
    time.sleep(4)
    open("lived on", "w").close()
    os._exit(0)
"""


def test_what_a_script_has_forked_lives_on_after_a_good_end(tmp_path: Path) -> None:
    """As under torchrun."""
    path = tmp_path / "forks.py"
    path.write_text(FORKS)
    with Launched(tmp_path / "job", paceline_run(str(path))) as job:
        assert job.wait(80) == 0
        end_s = time.monotonic() + 30
        while not (job.work / "lived on").exists() and time.monotonic() < end_s:
            time.sleep(0.2)
        assert (job.work / "lived on").exists()


PRINTS = """
import os
for number in range(3):
    print("line", number, flush=True)
open(f"rank {os.environ['RANK']} went on", "w").close()
"""


def test_output_on_a_full_disk_fails_a_run_at_its_end(tmp_path: Path) -> None:
    path = tmp_path / "prints.py"
    path.write_text(PRINTS)
    full = lambda command: ["bash", "-c", 'exec "$@" >/dev/full', "run", *command]  # noqa: E731
    with Launched(tmp_path / "job", paceline_run("--nproc-per-node", "2", str(path)), around=full) as job:
        assert job.wait(80) == 2
        assert "standard output cannot be written: No space left on device." in job.text
        assert job.text.rstrip().endswith("[PL603]")
        assert all((job.work / f"rank {rank} went on").exists() for rank in range(2))
        (log,) = job.work.glob("logs/*/rank-0001.log")
        assert log.read_text() == "line 0\nline 1\nline 2\n"
