"""Batch scripts for SLURM: their text, what they refuse, and what they do beside a SLURM of shell scripts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from paceline.cli.main import main
from paceline.errors import PacelineError
from paceline.schedulers.target import read_nodes
from paceline.schedulers.times import check_grace, read_time_s

RECIPE = str(Path(__file__).parents[2] / "recipes" / "gpt-stdlib.toml")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "train.py").write_text("print('trained')\n")
    (tmp_path / "bin").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    return tmp_path


def add_program(folder: Path, name: str, text: str) -> None:
    path = folder / "bin" / name
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)


def render(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["launch", "slurm", *words]) == 0
    return capsys.readouterr().out


# ---- text


@pytest.mark.parametrize(
    ("nodes", "failed", "step", "said"),
    [
        (
            "2:3",
            "node1",
            '--nodes=2 --exclude=node1 paceline run --nnodes "2:2"',
            "left out after the check: node1",
        ),
        ("2:3", "", 'paceline run --nnodes "2:3"', ""),
        (
            "3",
            "node1",
            "",
            "2 nodes passed the check, at least 3 are needed; submit again with --exclude=node1",
        ),
    ],
)
def test_nodes_that_fail_the_check_are_kept_out(
    folder: Path, capsys: pytest.CaptureFixture[str], nodes: str, failed: str, step: str, said: str
) -> None:
    text = render(capsys, "--nodes", nodes, "--time", "1:00:00", "--doctor", "train.py")
    begin = text.index("# The nodes check themselves")
    part = text[begin : text.index("# Before the time limit")]
    passed = [f"node{i}" for i in range(3) if f"node{i}" != failed]
    add_program(folder, "scontrol", 'echo "NodeAddr=10.0.0.9"')
    add_program(
        folder,
        "srun",
        'while [ "$1" != --nodelist ]; do shift; done\n'
        f"printf '%s\\n' {' '.join(passed)} > \"$2\"; echo -n '{failed}' > \"$2.failed\"",
    )
    script = f'say() {{ echo "$*"; }}\njob=7 address=10.0.0.1 port=1 SLURM_JOB_NUM_NODES=3\n{part}'
    script += 'echo "address $address"'
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)
    assert said in done.stdout, done.stderr
    assert done.returncode == (0 if step else 1)
    if step:
        assert f"address {'10.0.0.9' if failed else '10.0.0.1'}" in done.stdout
        line = text[text.index("# One launcher per node") :].replace("\\\n ", "")
        values = {"$left_out": "--nodes=2 --exclude=node1" if failed else "", "$good": str(len(passed))}
        for name, value in values.items():
            line = line.replace(name, value)
        assert step in " ".join(line.split())


def test_a_script_on_a_fixed_number_of_nodes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "--nodes",
        "2",
        "--gpus-per-node",
        "8",
        "--time",
        "1-0",
        "--partition",
        "gpu",
        "--account",
        "lab",
    ]
    text = render(capsys, *words, "train.py", "--lr", "3e 4")
    options = [line.split("  #")[0].strip() for line in text.splitlines() if line.startswith("#SBATCH")]
    assert options == [
        f"#SBATCH --{option}"
        for option in (
            *("job-name=train", "nodes=2", "gpus-per-node=8", "partition=gpu"),
            *("account=lab", "time=1-0", "signal=B:USR1@120", "output=%x-%j.out", "open-mode=append"),
            "requeue",
        )
    ]
    assert '--nnodes "2" --nproc-per-node 8 --grace-s "$grace" --shutdown-timeout 105' in text
    assert "  train.py --lr '3e 4' &" in text
    assert "no-kill" not in text, "SLURM itself requeues a job of which a node is lost"


def test_a_recipe_on_a_range_of_nodes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--nodes", "2:4", "--time", "60", "--cpus-per-node", "4", "--interface", "ib0", "--mem", "9G"]
    more = ["--setup", "module load cuda", "--option", "--constraint=a b", "--name", "x"]
    text = render(capsys, *words, *more, RECIPE, "--set", "layout.dp_replicate=auto", "--out", "runs/a")
    assert "#SBATCH --nodes=2-4\n" in text
    assert "#SBATCH --constraint='a b'\n" in text
    for line in (
        "#SBATCH --no-kill",
        "#SBATCH --cpus-per-task=4",
        "#SBATCH --mem=9G",
        "\nmodule load cuda\n",
    ):
        assert line in text, line
    assert '--kill-on-bad-exit=0 --no-kill --cpus-per-task 4 paceline run \\\n  --nnodes "2:$SLURM_' in text
    assert "--max-restarts 3" in text
    assert f"-m paceline train {RECIPE} --set layout.dp_replicate=auto --out runs/a &" in text
    assert "export GLOO_SOCKET_IFNAME=ib0 NCCL_SOCKET_IFNAME=ib0" in text
    (folder / "x.sh").write_text(text)
    subprocess.run(["bash", "-n", "x.sh"], check=True)


# ---- mistakes

BATCH = """#!/bin/bash
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=8
export RANK=$SLURM_PROCID
srun torchrun --nnodes=$SLURM_NNODES --nproc_per_node=8 --node_rank=$SLURM_NODEID train.py
"""


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (["--nodes", "4:2", "train.py"], "PL365", "--nodes 4:2"),
        (["--nodes", "0", "train.py"], "PL365", "--nodes 0"),
        (["--nodes", "two", "train.py"], "PL365", "--nodes two"),
        (["--nodes", "2", "--nproc-per-node", "0", "train.py"], "PL365", "--nproc-per-node 0"),
        (["--nodes", "2", "--time", "soon", "train.py"], "PL366", "--time soon"),
        (["--nodes", "2", "--time", "0", "train.py"], "PL366", "--time 0"),
        (["--nodes", "2", "--time", "3:00", "train.py"], "PL366", "a time limit of 180 s"),
        (["--nodes", "2", "--grace-s", "10", "train.py"], "PL366", "--grace-s 10"),
        (["--nodes", "2", "--time", "2", "train.py"], "PL366", "Use --time 4 (minutes) or more"),
        (
            ["--nodes", "2", "--time", "2", "--grace-s", "70", "train.py"],
            "PL366",
            "or --grace-s 59 at most",
        ),
        (["--nodes", "2", "missing.py"], "PL340", "missing.py is not a file"),
        (["--nodes", "2", "--name", "a\n#SBATCH --mem=1", "train.py"], "PL370", "--job-name"),
        (["--nodes", "2", "--file", "train.py", "train.py"], "PL371", "train.py exists"),
        (["--nodes", "2", "--file", "none/x.sbatch", "train.py"], "PL371", "No such file"),
        (["--nodes", "2", "job.sh"], "PL364", "RANK is set before srun"),
        (["--nodes", "2", "job.sh"], "PL364", "each of 8 tasks on a node starts 8 ranks"),
        (["--nodes", "2", "job.sh"], "PL364", "$SLURM_NODEID is replaced before srun"),
        (["--nodes", "2:3", RECIPE, "--set", "layout.dp_shard=2"], "PL113", "3 ranks"),
        (
            ["--nodes", "2:3", RECIPE, "--set", "layout.dp_shard=2"],
            "PL113",
            "--nodes 2:3 allows 3 ranks, which the layout does not fit",
        ),
    ],
)
def test_mistakes(
    folder: Path, words: list[str], code: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "job.sh").write_text(BATCH)
    time_words = [] if "--time" in words else ["--time", "1:0:0"]
    assert main(["launch", "slurm", *time_words, *words]) == 2
    error = capsys.readouterr().err
    assert told in error
    assert f"[{code}]" in error
    assert (folder / "train.py").read_text() == "print('trained')\n"


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("5", 300), ("5:30", 330), ("2:0:1", 7201), ("1-2", 93600), ("1-2:3", 93780), ("1-2:3:4", 93784)],
)
def test_times(text: str, seconds: int) -> None:
    assert read_time_s(text) == seconds


def test_grace_leaves_time_to_requeue() -> None:
    assert check_grace(60, 300) == 45
    with pytest.raises(PacelineError, match="PL366"):
        check_grace(300, 300)
    assert (read_nodes("3").is_range, read_nodes("1:3").is_range) == (False, True)


# ---- submitting


def test_submit(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    add_program(folder, "sbatch", 'cp "$2" submitted; echo 42')
    words = ["--nodes", "2", "--time", "5", "--submit", "--json", "train.py"]
    done = json.loads(render(capsys, *words))
    assert (done["file"], done["submitted"]) == ("train.sbatch", "42")
    assert (folder / "submitted").read_text() == (folder / "train.sbatch").read_text() == done["text"]
    render(capsys, *words)  # replaces its own file
    assert (folder / "train.sbatch").stat().st_mode & 0o077 == 0  # the script's arguments may be a secret


def test_no_sbatch(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PATH", f"{folder}/bin")
    assert main(["launch", "slurm", "--nodes", "2", "--time", "5", "--submit", "train.py"]) == 2
    error = capsys.readouterr().err
    assert "sbatch is not on this machine's PATH; train.sbatch is written" in error
    assert "[PL367]" in error
    assert (folder / "train.sbatch").exists()


def test_a_refusal_is_passed_on(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    add_program(folder, "sbatch", "echo 'sbatch: error: invalid partition specified: gpu' >&2; exit 1")
    words = ["--nodes", "2", "--time", "5", "--partition", "gpu", "--submit", "train.py"]
    assert main(["launch", "slurm", *words]) == 2
    error = capsys.readouterr().err
    assert "invalid partition specified: gpu" in error
    assert "[PL368]" in error


# ---- what the script does: SLURM's programs are shell scripts that read files


def run_script(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    *,
    code: int,
    state: str = "JobState=RUNNING Restarts=0 x PreemptTime=None",
    lost: str = "",
    restarts: str = "",
    signum: int = 0,
    requeues: bool = True,
    nodes: str = "2",
    grace: int = 0,
) -> tuple[int, str]:
    """Return the script's exit code and output, where srun ends with `code`."""
    (folder / "job.sh").write_text(
        render(
            capsys,
            *("--nodes", nodes, "--time", "5", "--max-requeues", "3"),
            "train.py",
        )
    )
    report = 'echo "$*" > srun.words; '
    wait = "trap 'exit $(cat code)' TERM; echo $$ > srun.pid; while true; do sleep 0.1; done"
    add_program(folder, "srun", report + (wait if signum else "exit $(cat code)"))
    add_program(folder, "scancel", 'echo "scancel $*"; [ ! -e srun.pid ] || kill -TERM $(cat srun.pid)')
    add_program(folder, "sinfo", f"echo '{lost}'")
    # SLURM ends the job, and with it scontrol, as soon as it has taken the request.
    requeue = "kill -TERM $$; echo requeue $2" if requeues else "echo disabled >&2; exit 1"
    add_program(
        folder,
        "scontrol",
        f"case $1$2 in showhostnames) echo node0; echo node1;; shownode) echo ' NodeAddr=10.0.0.1 ';;\n"
        f"showjob) echo 'JobId=77 {state}';; requeue*) {requeue};;\n"
        f"showpartition) echo '   GraceTime={grace} Hidden=NO';; esac",
    )
    (folder / "code").write_text(str(code))
    env = {"PATH": os.environ["PATH"], "SLURM_JOB_ID": "77", "SLURM_JOB_NODELIST": "node[0-1]"}
    if restarts:
        env["SLURM_RESTART_COUNT"] = restarts
    words = ["bash", "job.sh"]
    with subprocess.Popen(words, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as job:
        if signum:
            while not (folder / "srun.pid").exists() or not (folder / "srun.pid").read_text().strip():
                assert job.poll() is None
                time.sleep(0.05)
            job.send_signal(signum)
        out = job.communicate(timeout=60)[0]
    return job.returncode, out


GONE = "JobState=COMPLETING Restarts=0 x PreemptTime=None"
PREEMPTED = "JobState=RUNNING Restarts=0 x PreemptTime=2026-01-01T10:00:00"


@pytest.mark.parametrize(
    ("facts", "told", "is_requeued"),
    [
        ({"code": 0}, "finished", False),
        ({"code": 1}, "failed with exit code 1; not started again", False),
        ({"code": 75, "signum": signal.SIGUSR1}, "stopped by the time limit, not finished", True),
        ({"code": 75, "state": PREEMPTED}, "stopped by preemption, not finished", True),
        ({"code": 75}, "stopped by a signal, not finished", True),
        ({"code": 143, "signum": signal.SIGUSR1}, "stopped by the time limit, not finished", True),
        ({"code": 75, "state": GONE}, "cancelled by scancel with exit code 75; not started again", False),
        (
            {"code": 137, "state": GONE, "signum": signal.SIGUSR1},
            "ended by the time limit before the ranks had left",
            False,
        ),
        ({"code": 1, "lost": "node1"}, "node failure: node1", True),
        ({"code": 1, "lost": "node1", "state": GONE}, "node failure: node1; SLURM starts", False),
        ({"code": 1, "lost": "node1", "nodes": "1:2"}, "node failure: node1", True),
        # It went on without the node.
        ({"code": 75, "lost": "node1", "state": GONE, "nodes": "1:2"}, "cancelled by scancel", False),
        ({"code": 75, "lost": "node1", "state": PREEMPTED, "nodes": "1:2"}, "stopped by preemption", True),
        ({"code": 75, "state": GONE.replace("=0", "=1")}, "requeued from outside", False),
        (
            {"code": 75, "restarts": "3", "state": PREEMPTED.replace("=0", "=3")},
            "it was requeued 3 times already",
            False,
        ),
    ],
    ids=lambda value: None if isinstance(value, dict | bool) else value.split()[-1],
)
def test_what_ended_a_job(
    folder: Path, facts: dict[str, object], told: str, is_requeued: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out = run_script(folder, capsys, **facts)  # type: ignore[arg-type]
    assert code == facts["code"], out
    assert told in out
    assert ("requeue 77" in out) == is_requeued, out
    assert ("scancel --signal=TERM 77" in out) == ("signum" in facts)


@pytest.mark.parametrize(("grace", "told"), [(0, 105), (60, 60), (300, 105)])
def test_ranks_know_the_partitions_grace_time(
    folder: Path, grace: int, told: int, capsys: pytest.CaptureFixture[str]
) -> None:
    run_script(folder, capsys, code=0, grace=grace)
    assert f"--grace-s {told} --shutdown-timeout 105" in (folder / "srun.words").read_text()


def test_a_requeue_that_is_not_permitted(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out = run_script(folder, capsys, code=75, requeues=False)
    assert code == 75
    assert "SLURM does not permit a requeue; submit this script again" in out
