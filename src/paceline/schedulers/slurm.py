"""Renders a batch script for SLURM: one task per node, a save before the end, and a requeue after it.

The script is plain bash that a person can read and edit. What it relies on, from sbatch's and srun's manuals
and SLURM 22.05:

- `--signal=B:USR1@S` signals the script alone, S seconds before the time limit or up to a minute earlier.
- `scancel --signal=TERM JOB` signals the steps and not the script. So does a preemption, which also sets the
  job's `PreemptTime`.
- `scancel JOB` signals both, and the job is no longer RUNNING.
- A script that ends during a preemption's grace time makes its job COMPLETED, so it must requeue it itself.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.errors import PacelineError
from paceline.exit_codes import STOPPED
from paceline.schedulers.target import MARK, ClusterJob, flag, quote
from paceline.schedulers.times import check_grace, read_time_s


@dataclass(frozen=True, kw_only=True)
class SlurmJob(ClusterJob):
    """A job for SLURM."""

    time: str = flag(..., "T", "time limit: minutes, H:M:S or D-H:M:S")
    partition: str | None = flag(None, "NAME", "the partition to run in")
    account: str | None = flag(None, "NAME", "the account that pays")
    output: str = flag("%x-%j.out", "FILE", "all output (default %%x-%%j.out)")
    max_requeues: int = flag(
        100, "N", "number of times that the job requeues itself (default %(default)s)", type=int
    )
    setup: tuple[str, ...] = flag([], "LINE", "shell to run first, such as module load", action="append")
    options: tuple[str, ...] = flag(
        [], "KEY=VALUE", "another option of sbatch", name="option", action="append"
    )


def render_slurm(job: SlurmJob) -> str:
    """Return the batch script."""
    leave_s = check_grace(job.grace_s, read_time_s(job.time))
    lines = ["#!/bin/bash", *(f"#SBATCH --{option}" for option in _list_options(job))]
    wide = max(len(line) for line in lines if line.partition("=")[0] in _WHY)
    lines = [_explain(line, wide) for line in lines]
    parts = ["\n".join(lines), _HEAD.format(mark=MARK), *job.setup, _MEET + _SAY]
    if job.interface is not None:
        name = quote([job.interface])
        parts.append(f"export GLOO_SOCKET_IFNAME={name} NCCL_SOCKET_IFNAME={name}")
    if job.has_doctor:
        parts.append(_DOCTOR.format(ranks=job.nproc_per_node, least=job.nodes.least))
    end = _END.format(
        stopped=STOPPED,
        most=job.max_requeues,
        lost_ends="" if job.nodes.is_range else _LOST_ENDS,
    )
    parts += [_SIGNALS, _render_step(job, leave_s), end]
    return "\n".join(parts)


def _list_options(job: SlurmJob) -> list[str]:
    # No --ntasks-per-node here: with it, SLURM grants only the least of a range of nodes (22.05).
    few, many = job.nodes.least, job.nodes.most
    nodes = f"{few}-{many}" if job.nodes.is_range else str(many)
    wishes = {
        "job-name": job.name,
        "nodes": nodes,
        "gpus-per-node": str(job.gpus_per_node) if job.gpus_per_node else None,
        "cpus-per-task": None if job.cpus_per_node is None else str(job.cpus_per_node),
        "mem": job.mem,
        "partition": job.partition,
        "account": job.account,
        "time": job.time,
        "signal": f"B:USR1@{job.grace_s}",
        "output": job.output,
        "open-mode": "append",
    }
    options = [f"{key}={_check_line(key, value)}" for key, value in wishes.items() if value is not None]
    options += ["requeue", *(["no-kill"] if job.nodes.is_range else [])]
    for option in job.options:
        key, equals, value = option.lstrip("-").partition("=")
        options.append(_check_line("option", key) + (equals and "=" + _check_line(key, value)))
    return options


def _check_line(key: str, value: str) -> str:
    if not value.isprintable() or not value.strip():
        raise PacelineError(
            "PL370",
            saw=f"--{key} {value!r}.",
            rule="Each option is one line of the file, of printable characters.",
            fix="Remove line breaks and control characters.",
        )
    return quote([value]) if " " in value or "#" in value else value


_WHY = {
    "#SBATCH --signal": "signals this script, so many seconds before the time limit",
    "#SBATCH --open-mode": "output of the next start follows that of the last",
    "#SBATCH --requeue": "after a node failure, SLURM starts the job again",
    "#SBATCH --no-kill": "the job goes on without a lost node",
}


def _explain(line: str, wide: int) -> str:
    why = _WHY.get(line.partition("=")[0])
    return line if why is None else f"{line:<{wide}}  # {why}"


_HEAD = """
# {mark} slurm`."""

_MEET = """
# The nodes meet at the first node of the allocation, at a port that follows from the job's number.
job=$SLURM_JOB_ID
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
address=$(scontrol show node "$head" | sed -n 's/.*NodeAddr=\\([^ ]*\\).*/\\1/p')
port=$((12000 + SLURM_JOB_ID % 20000))
"""

# A job of a fixed number of nodes cannot go on with fewer, and names those to leave out.
_DOCTOR = """
# The nodes check themselves and each other. Those that fail are left out.
passed=$PWD/.paceline-doctor-$job
srun --ntasks-per-node=1 --kill-on-bad-exit=0 paceline doctor --nproc-per-node {ranks} \\
  --nnodes "$SLURM_JOB_NUM_NODES" --rdzv-endpoint "$address:$port" --rdzv-id "$job" --nodelist "$passed"
touch "$passed" "$passed.failed"
good=$(wc -l < "$passed") bad=$(sort -u "$passed.failed" | paste -sd ,)
head=$(head -n 1 "$passed"); rm -f "$passed" "$passed.failed"
left_out=
if [ "$good" -lt {least} ]; then
  say "$good nodes passed the check, at least {least} are needed; submit again with --exclude=$bad"
  exit 1
elif [ -n "$bad" ]; then
  say "left out after the check: $bad"
  left_out="--nodes=$good --exclude=$bad"
  address=$(scontrol show node "$head" | sed -n 's/.*NodeAddr=\\([^ ]*\\).*/\\1/p')
fi
"""

_SAY = """\
export SLURM_RESTART_COUNT=${SLURM_RESTART_COUNT:-0}
say() { echo "$(date '+%F %T') job $job: $*"; }
say "start $((SLURM_RESTART_COUNT + 1)) on $SLURM_JOB_NODELIST"
"""

_SIGNALS = """
# Before the time limit, SLURM signals this script only. The ranks then save and leave.
near_limit=
trap 'near_limit=yes; say "the time limit is near: asking the ranks to save"
      scancel --signal=TERM "$job"' USR1
trap : TERM  # by scancel, which signals the ranks too
"""


def _render_step(job: SlurmJob, leave_s: int) -> str:
    """Render the lines that start the step and wait for it."""
    nnodes = f"{job.nodes.least}:$SLURM_JOB_NUM_NODES" if job.nodes.is_range else str(job.nodes.most)
    restarts = f" --max-restarts {job.nodes.restarts}" if job.nodes.restarts else ""
    no_kill = " --no-kill" if job.nodes.is_range else ""
    if job.has_doctor:
        no_kill += " $left_out"
        nnodes = nnodes.replace("$SLURM_JOB_NUM_NODES", "$good")
    meet = '--rdzv-backend c10d --rdzv-endpoint "$address:$port" --rdzv-id "$job.$SLURM_RESTART_COUNT"'
    cpus = "" if job.cpus_per_node is None else f" --cpus-per-task {job.cpus_per_node}"
    limits = f'--grace-s "$grace" --shutdown-timeout {leave_s}'
    return f"""
# Ranks have {leave_s} s before the time limit. At a preemption they may have less: the partition's GraceTime.
grace={leave_s}
preempted=$(scontrol show partition "$SLURM_JOB_PARTITION" | sed -n 's/.*GraceTime=\\([0-9]*\\).*/\\1/p')
if [ "${{preempted:-0}}" -gt 0 ] && [ "$preempted" -lt "$grace" ]; then grace=$preempted; fi

# One launcher per node, which starts the node's ranks.
srun --ntasks-per-node=1 --kill-on-bad-exit=0{no_kill}{cpus} paceline run \\
  --nnodes "{nnodes}" --nproc-per-node {job.nproc_per_node}{restarts} {limits} \\
  {meet} \\
  {quote(job.target.words)} &
step=$!
while kill -0 "$step" 2>/dev/null; do sleep 1 & wait $!; done  # a signal ends this wait, not the step
wait "$step"
code=$?"""


# Without --no-kill, a lost node ends the job.
_LOST_ENDS = """\
elif [[ $state != *JobState=RUNNING* && -n $lost ]]; then
  say "node failure: $lost; SLURM starts the job again"
"""

_END = """
# What ended the step: SLURM's controller knows.
state=$(scontrol show job "$job")
lost=$(sinfo -h -N -n "$SLURM_JOB_NODELIST" -t down,fail,no_respond -o %N | sort -u | paste -sd ,)
again=
if [ "$code" = 0 ]; then
  say "finished"
elif [[ $state != *" Restarts=$SLURM_RESTART_COUNT "* ]]; then
  say "requeued from outside, with exit code $code"
{lost_ends}elif [[ $state != *JobState=RUNNING* && -n $near_limit ]]; then
  say "ended by the time limit before the ranks had left: use a larger --grace-s, and submit again"
elif [[ $state != *JobState=RUNNING* ]]; then
  say "cancelled by scancel with exit code $code; not started again"
elif [ "$code" != {stopped} ] && [ "$code" != 143 ]; then  # 143: SIGTERM came before the launcher was up
  if [ -n "$lost" ]; then
    say "node failure: $lost"; again=yes
  else
    say "failed with exit code $code; not started again"
  fi
elif [[ $state == *PreemptTime=[0-9]* ]]; then
  say "stopped by preemption, not finished"; again=yes
elif [ -n "$near_limit" ]; then
  say "stopped by the time limit, not finished"; again=yes
else
  say "stopped by a signal, not finished"; again=yes
fi
if [ -n "$again" ] && [ "$SLURM_RESTART_COUNT" -ge {most} ]; then
  say "not requeued: it was requeued {most} times already (--max-requeues)"
elif [ -n "$again" ]; then
  if (trap "" TERM; scontrol requeue "$job"); then  # requeueing ends this job, and scontrol with it
    say "requeued"
  else
    say "SLURM does not permit a requeue; submit this script again, and the run goes on"
  fi
fi
exit "$code"
"""
