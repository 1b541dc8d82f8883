"""Renders a job for Kubernetes: one pod per node, stable names, and restarts that agree with the launcher's.

A Job has indexed pods, and a headless Service gives them names. A pod that was stopped or moved (exit code
75, or the condition DisruptionTarget) is made again and not counted. The launchers of the other pods restart
their ranks and wait for it.

Pods pass the Pod Security standard `restricted`, and a NetworkPolicy admits only pods of the same job: the
ports of torch's store and of gloo have no authentication. The Job follows the documentation of batch/v1
(`podFailurePolicy`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from paceline.errors import PacelineError
from paceline.exit_codes import STOPPED
from paceline.schedulers.target import MARK, ClusterJob, flag, quote
from paceline.schedulers.times import check_grace
from paceline.schedulers.yaml_text import dump_yaml

# Pods append "-NNNNN", and a name has 63 letters at most.
_NAME = re.compile(r"[a-z]([a-z0-9-]{0,44}[a-z0-9])?")
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)(Ki|Mi|Gi|Ti|k|M|G|T)?")
_UNITS: dict[str, int] = {"": 1, **{f"{x}i": 1024**n for n, x in enumerate("KMGT", 1)}}
_UNITS |= {x: 1000**n for n, x in enumerate("kMGT", 1)}
_LABEL, _QUEUE = "app.kubernetes.io/name", "kueue.x-k8s.io/queue-name"
_OPTIONS = {
    "ttl": r"[0-9]{1,9}",
    "node-selector": r"[^=\s]+=[^=\s]*",
    "toleration": r"[^=:\s]+(=[^=:\s]*)?:(NoSchedule|PreferNoSchedule|NoExecute)",
    "priority-class": r"[a-z0-9][a-z0-9.-]*",
    "pull-secret": r"[a-z0-9][a-z0-9.-]*",
    "service-account": r"[a-z0-9][a-z0-9.-]*",
    "queue": r"[a-z0-9][a-z0-9.-]*",
}
_CONTAINER = "paceline"
_TTL_S = 7 * 24 * 3600
# Without --mem, a rank requests this much beside /dev/shm: torch itself takes about 0.3 GB.
_RANK_GIB = 4
_WAIT_S = 600
_IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@-]*")
_VOLUME = re.compile(r"([a-z0-9][a-z0-9.-]*):(/[^\s:]*)")
_PORT = 29500
_RESTARTS = 3


@dataclass(frozen=True, kw_only=True)
class KubernetesJob(ClusterJob):
    """A job for Kubernetes: pods NAME-0, NAME-1 and so on.

    Without `cpus_per_node`, a pod requests a core for each rank, without a limit; without `mem`, 4 GiB for
    each rank beside `shm`. The image has the target at the same path.
    """

    image: str = flag(..., "IMAGE", "container image with Paceline and the code")
    workdir: str | None = flag(None, "DIR", "folder to run in (default: the image's)")
    # Loader workers and NCCL use it; it counts as memory of the pod.
    shm: str = flag("8Gi", "SIZE", "size of /dev/shm (default 8Gi)")
    volumes: tuple[str, ...] = flag(
        [], "CLAIM:PATH", "mount a persistent volume claim", name="volume", action="append"
    )
    # Not 0, which the standard `restricted` forbids.
    user: int = flag(1000, "UID", "user that the pods run as (default 1000)", type=int)
    options: tuple[str, ...] = flag(
        [], "KEY=VALUE",
        "ttl=SECONDS (default a week), node-selector=KEY=VALUE, toleration=KEY[=VALUE]:EFFECT, "
        "priority-class=NAME, pull-secret=NAME, service-account=NAME, queue=NAME (of Kueue); may be repeated",
        name="option", action="append",
    )  # fmt: skip

    def find(self, key: str) -> list[str]:
        """Return the values of one key of `options`."""
        return [text.partition("=")[2] for text in self.options if text.partition("=")[0] == key]


def render_kubernetes(job: KubernetesJob) -> str:
    """Return the job's YAML."""
    return f"# {MARK} kubernetes`.\n" + dump_yaml(build_documents(job))


def build_documents(job: KubernetesJob) -> list[dict[str, Any]]:
    """Return the job's objects."""
    _check(job)
    meta: dict[str, Any] = {"name": job.name, "labels": {_LABEL: job.name}}
    queued = meta
    if queues := job.find("queue"):
        queued = {**meta, "labels": {**meta["labels"], _QUEUE: queues[-1]}}
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": meta,
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {"job-name": job.name},
            "ports": [{"name": "rendezvous", "port": _PORT}],
        },
    }
    main = {"apiVersion": "batch/v1", "kind": "Job", "metadata": queued, "spec": _build_job(job)}
    return [_build_policy(meta), service, main]


def _build_policy(meta: dict[str, Any]) -> dict[str, Any]:
    """Build the rule that only pods of this job reach its pods, on any port."""
    pods = {"matchLabels": meta["labels"]}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": meta,
        "spec": {
            "podSelector": pods,
            "policyTypes": ["Ingress"],
            "ingress": [{"from": [{"podSelector": pods}]}],
        },
    }


def _build_job(job: KubernetesJob) -> dict[str, Any]:
    """Build the specification of the pods, which meet at the first one."""
    first = f"{job.name}-0.{job.name}"
    rules: list[dict[str, Any]] = [
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {"action": "Ignore", "onExitCodes": _exit_codes(STOPPED)},
        {"action": "FailJob", "onExitCodes": _exit_codes(2)},  # wrong input
    ]
    volumes, mounts = _build_volumes(job)
    container: dict[str, Any] = {"name": _CONTAINER, "image": job.image}
    if job.workdir is not None:
        container["workingDir"] = job.workdir
    container |= {
        "command": ["bash", "-c"],
        "args": [_build_command(job, first)],
        "ports": [{"name": "rendezvous", "containerPort": _PORT}],
    }
    if job.interface is not None:
        names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
        container["env"] = [{"name": name, "value": job.interface} for name in names]
    limits = _build_limits(job)
    requests = {"cpu": str(job.nproc_per_node), "memory": _request_memory(job), **limits}
    container["resources"] = {"requests": requests, **({"limits": limits} if limits else {})}
    status = f"paceline run --status --rdzv-backend c10d --rdzv-endpoint {first}:{_PORT} --rdzv-id {job.name}"
    container["readinessProbe"] = {
        "exec": {"command": ["bash", "-c", status]},
        "periodSeconds": 60,
        "timeoutSeconds": 20,
    }
    container["securityContext"] = {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
    }
    container["volumeMounts"] = mounts
    pod = {
        "subdomain": job.name,
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": job.grace_s,
        "automountServiceAccountToken": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": job.user,
            "runAsGroup": job.user,
            "fsGroup": job.user,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "topologySpreadConstraints": [
            {
                "maxSkew": 1,
                "topologyKey": "kubernetes.io/hostname",
                "whenUnsatisfiable": "ScheduleAnyway",
                "labelSelector": {"matchLabels": {_LABEL: job.name}},
            }
        ],
        **_build_placement(job),
        "containers": [container],
        "volumes": volumes,
    }
    if job.has_doctor:
        checked = ["paceline", "doctor", "--nproc-per-node", str(job.nproc_per_node)]
        alike = ("image", "workingDir", "env", "resources", "securityContext", "volumeMounts")
        same = {key: container[key] for key in alike if key in container}
        pod["initContainers"] = [{"name": "doctor", "command": checked, **same}]
    return {
        "completionMode": "Indexed",
        "completions": job.nodes.most,
        "parallelism": job.nodes.most,
        "backoffLimit": _RESTARTS * job.nodes.most,
        "ttlSecondsAfterFinished": int((job.find("ttl") or [str(_TTL_S)])[-1]),
        "podFailurePolicy": {"rules": rules},
        "template": {"metadata": {"labels": {_LABEL: job.name}}, "spec": pod},
    }


def _build_placement(job: KubernetesJob) -> dict[str, Any]:
    """Build what `options` say about where the pods run, and as whom."""
    built: dict[str, Any] = {}
    if selectors := job.find("node-selector"):
        built["nodeSelector"] = dict(text.split("=", 1) for text in selectors)
    if tolerations := job.find("toleration"):
        built["tolerations"] = [_build_toleration(text) for text in tolerations]
    for key, name in (("priority-class", "priorityClassName"), ("service-account", "serviceAccountName")):
        if values := job.find(key):
            built[name] = values[-1]
    if secrets := job.find("pull-secret"):
        built["imagePullSecrets"] = [{"name": name} for name in secrets]
    return built


def _build_toleration(text: str) -> dict[str, str]:
    taint, _, effect = text.rpartition(":")
    key, equals, value = taint.partition("=")
    how = {"operator": "Equal", "value": value} if equals else {"operator": "Exists"}
    return {"key": key, **how, "effect": effect}


def _exit_codes(*codes: int) -> dict[str, Any]:
    return {"containerName": _CONTAINER, "operator": "In", "values": list(codes)}


def _build_command(job: KubernetesJob, first: str) -> str:
    nodes = f"{job.nodes.least}:{job.nodes.most}" if job.nodes.is_range else str(job.nodes.most)
    leave_s = check_grace(job.grace_s, None)
    return f"""\
trap 'exit {STOPPED}' TERM
# The first pod's name is known once that pod has an address.
until getent hosts {first}; do
  if (( SECONDS > {_WAIT_S} )); then echo "{first} has no address after {_WAIT_S} s" >&2; exit 1; fi
  echo "waiting for {first}"; sleep 2
done
exec paceline run \\
  --nnodes {nodes} --nproc-per-node {job.nproc_per_node} --max-restarts {_RESTARTS} --grace-s {leave_s} \\
  --rdzv-backend c10d --rdzv-endpoint {first}:{_PORT} --rdzv-id {job.name} \\
  {quote(job.target.words)}
"""


def _request_memory(job: KubernetesJob) -> str:
    mib = _count_bytes(job.shm) / 1024**2 + _RANK_GIB * 1024 * job.nproc_per_node
    return f"{int(mib)}Mi"


def _count_bytes(size: str) -> Decimal:
    found = _SIZE.fullmatch(size)
    assert found is not None
    return Decimal(found[1]) * _UNITS[found[2] or ""]


def _build_limits(job: KubernetesJob) -> dict[str, str]:
    return {
        **({} if job.cpus_per_node is None else {"cpu": str(job.cpus_per_node)}),
        **({} if job.mem is None else {"memory": job.mem}),
        **({"nvidia.com/gpu": str(job.gpus_per_node)} if job.gpus_per_node else {}),
    }


def _build_volumes(job: KubernetesJob) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    volumes: list[dict[str, Any]] = [
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": job.shm}},
    ]
    mounts = [{"name": "shm", "mountPath": "/dev/shm"}]
    for number, volume in enumerate(job.volumes):
        claim, _, path = volume.partition(":")
        volumes.append({"name": f"volume-{number}", "persistentVolumeClaim": {"claimName": claim}})
        mounts.append({"name": f"volume-{number}", "mountPath": path})
    return volumes, mounts


def _check(job: KubernetesJob) -> None:
    rows = [
        ("--name", job.name, _NAME, "1 to 46 of a-z, 0-9 and -, from a letter", "--name train"),
        ("--image", job.image, _IMAGE, "the name of a container image", "--image registry/paceline:1"),
        ("--shm", job.shm, _SIZE, "a size of Kubernetes", "--shm 8Gi"),
        *(
            ("--mem", mem, _SIZE, "a size of Kubernetes", "--mem 200Gi")
            for mem in (job.mem,)
            if mem is not None
        ),
        *(("--volume", text, _VOLUME, "CLAIM:/path", "--volume data:/data") for text in job.volumes),
        *_list_options(job),
    ]
    for name, value, pattern, rule, example in rows:
        if pattern.fullmatch(value) is None:
            raise PacelineError(
                "PL369", saw=f"{name} {value!r}.", rule=f"It is {rule}.", fix=f"Use for example {example}."
            )
    if job.mem is not None and _count_bytes(job.shm) >= _count_bytes(job.mem):
        raise PacelineError(
            "PL369",
            saw=f"--shm {job.shm} in --mem {job.mem}.",
            rule="/dev/shm counts as memory of the pod, which is killed at --mem.",
            fix="Use a smaller --shm, or a larger --mem.",
        )
    if job.user < 1:
        raise PacelineError(
            "PL369",
            saw=f"--user {job.user}.",
            rule="Clusters with the Pod Security standard `restricted` refuse pods that run as root.",
            fix="Use the number of a user of the image, such as --user 1000.",
        )


def _list_options(job: KubernetesJob) -> Iterator[tuple[str, str, re.Pattern[str], str, str]]:
    known = re.compile("|".join(f"{key}={pattern}" for key, pattern in _OPTIONS.items()))
    rule = f"KEY=VALUE with one of the keys {', '.join(_OPTIONS)}"
    for text in job.options:
        yield "--option", text, known, rule, "--option toleration=nvidia.com/gpu:NoSchedule"
