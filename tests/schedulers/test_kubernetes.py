"""Jobs for Kubernetes: every rendered kind has a schema and obeys it, and its command does what it says."""

from __future__ import annotations

import copy
import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from paceline.cli.main import main
from paceline.schedulers.kubernetes import KubernetesJob, build_documents, render_kubernetes
from paceline.schedulers.target import Nodes, Target
from tests.schedulers.closed_schema import find_faults

JOBS: list[dict[str, Any]] = [
    {},
    {"gpus_per_node": 8, "nproc_per_node": 8, "mem": "200Gi", "cpus_per_node": 96, "interface": "eth0"},
    {"nodes": Nodes(2, 4), "workdir": "/code", "volumes": ("data:/data", "runs:/runs"), "shm": "64Gi"},
    {"target": Target("recipes/gpt.toml", ("--set", "train.steps=9", "it's", "a b"))},
    {"has_doctor": True, "nproc_per_node": 8, "gpus_per_node": 8},
    {
        "options": (
            "ttl=60",
            "node-selector=pool=gpu",
            "toleration=nvidia.com/gpu:NoSchedule",
            "toleration=pool=train:NoExecute",
            "priority-class=high",
            "pull-secret=registry",
            "service-account=trainer",
            "queue=team",
        )
    },
]


def build(**options: Any) -> KubernetesJob:
    plain = {"target": Target("train.py"), "nodes": Nodes(2, 2), "nproc_per_node": 1, "name": "train"}
    return KubernetesJob(image="registry:5000/paceline:1", grace_s=120, **{**plain, **options})


@pytest.mark.parametrize("options", JOBS, ids=["plain", "gpus", "range", "recipe", "doctor", "options"])
def test_what_is_rendered_obeys_the_schema(options: dict[str, Any]) -> None:
    job = build(**options)
    read = list(yaml.safe_load_all(render_kubernetes(job)))
    assert read == build_documents(job), "the text says what was built"
    assert [fault for document in read for fault in find_faults(document)] == []
    assert [document["kind"] for document in read] == ["NetworkPolicy", "Service", "Job"]


def find_job(documents: list[dict[str, Any]]) -> dict[str, Any]:
    return documents[-1]["spec"]


SPOILERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "misspelt": lambda job: job.update(completionmode="Indexed"),
    "deep": lambda job: job["template"]["spec"]["containers"][0].update(volumeMount=[]),
    "wrong type": lambda job: job.update(completions="2"),
    "bool for a number": lambda job: job.update(completions=True),
    "no such value": lambda job: job["template"]["spec"].update(restartPolicy="never"),
    "missing": lambda job: job["template"]["spec"].pop("containers"),
    "below": lambda job: job.update(backoffLimit=-1),
    "quantity": lambda job: job["template"]["spec"]["volumes"][0]["emptyDir"].update(sizeLimit="8 GB"),
}


@pytest.mark.parametrize("name", SPOILERS)
def test_the_schema_finds_mistakes(name: str) -> None:
    documents = copy.deepcopy(build_documents(build()))
    SPOILERS[name](find_job(documents))
    assert len([fault for document in documents for fault in find_faults(document)]) == 1


def test_a_kind_without_a_schema_is_a_fault() -> None:
    pytorch_job = {"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob"}
    assert find_faults(pytorch_job) == ["there is no schema for kubeflow.org-v1.PyTorchJob"]


def test_the_command_of_a_pod(tmp_path: Path) -> None:
    """It waits for the first pod's name, for a limited time, and becomes the launcher."""
    first = "train-0.train"
    programs = {
        "getent": f'[ "$2" = {first} ] && [ -e known ] || {{ touch known; exit 2; }}',
        "paceline": 'printf "%s\\n" $$ "$@"',
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    documents = build_documents(build(target=Target("my train.py", ("--lr", "3 4"))))
    job = find_job(documents)
    container = job["template"]["spec"]["containers"][0]
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    words = [*container["command"], *container["args"]]
    with subprocess.Popen(words, env=env, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as pod:
        lines = pod.communicate(timeout=60)[0].splitlines()
    assert lines[:2] == [f"waiting for {first}", str(pod.pid)], "signals of the pod reach the launcher"
    given = " ".join(lines[2:])
    assert f"--rdzv-endpoint {first}:29500 --rdzv-id train" in given
    assert "--max-restarts" in given
    assert lines[-3:] == ["my train.py", "--lr", "3 4"]
    assert "--grace-s 105" in given
    assert job["template"]["spec"]["terminationGracePeriodSeconds"] == 120


def test_a_stopped_pod_is_made_again_and_not_counted() -> None:
    documents = build_documents(build())
    rules = find_job(documents)["podFailurePolicy"]["rules"]
    stopped = [rule for rule in rules if 75 in rule.get("onExitCodes", {}).get("values", [])]
    assert [rule["action"] for rule in stopped] == ["Ignore"]


def test_pods_pass_the_restricted_standard() -> None:
    """https://kubernetes.io/docs/concepts/security/pod-security-standards/"""
    pod = find_job(build_documents(build(has_doctor=True)))["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"]
    assert pod["securityContext"]["runAsUser"] > 0
    assert pod["securityContext"]["seccompProfile"]["type"] == "RuntimeDefault"
    assert {key for volume in pod["volumes"] for key in volume} <= {
        "name",
        "emptyDir",
        "persistentVolumeClaim",
    }
    for container in pod["initContainers"] + pod["containers"]:
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def test_a_pod_checks_its_node_before_it_starts() -> None:
    plain, checked = (
        find_job(build_documents(build(nproc_per_node=8, gpus_per_node=8, has_doctor=flag)))
        for flag in (False, True)
    )
    assert "initContainers" not in plain["template"]["spec"]
    (doctor,) = checked["template"]["spec"]["initContainers"]
    assert doctor["command"] == ["paceline", "doctor", "--nproc-per-node", "8"]
    assert doctor["image"] == "registry:5000/paceline:1"
    assert "/dev/shm" in [mount["mountPath"] for mount in doctor["volumeMounts"]]


def test_a_pod_requests_what_it_needs_and_limits_what_was_given() -> None:
    def find(**options: Any) -> Any:
        job = find_job(build_documents(build(**options)))
        return job["template"]["spec"]["containers"][0]["resources"]

    assert find(nproc_per_node=2) == {"requests": {"cpu": "2", "memory": "16384Mi"}}
    limits = {"cpu": "4", "memory": "64Gi", "nvidia.com/gpu": "1"}
    assert find(cpus_per_node=4, mem="64Gi", gpus_per_node=1) == {"requests": limits, "limits": limits}


def test_options_reach_the_pods() -> None:
    documents = build_documents(build(**JOBS[-1]))
    job = documents[-1]
    pod = job["spec"]["template"]["spec"]
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team"
    assert job["spec"]["ttlSecondsAfterFinished"] == 60
    assert pod["nodeSelector"] == {"pool": "gpu"}
    assert pod["tolerations"] == [
        {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"},
        {"key": "pool", "operator": "Equal", "value": "train", "effect": "NoExecute"},
    ]
    assert (pod["priorityClassName"], pod["serviceAccountName"]) == ("high", "trainer")
    assert pod["imagePullSecrets"] == [{"name": "registry"}]


def test_a_run_without_a_volume_is_lost_with_its_pod(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["launch", "kubernetes", "--nodes", "2", "--image", "x"]
    assert main([*words, "My_Train.py"]) == 0
    assert "without --volume" in capsys.readouterr().err
    assert main([*words, "--volume", "runs:/runs", "My_Train.py"]) == 0
    assert capsys.readouterr().err == ""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "My_Train.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    return tmp_path


def test_the_command_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "kubernetes", "--nodes", "2", "--image", "x", "My_Train.py"]) == 0
    text = capsys.readouterr().out
    assert list(yaml.safe_load_all(text))[-1]["metadata"]["name"] == "my-train"
    assert "hf_secret" not in text, "nothing of the environment is rendered"
    (folder / "kubectl").write_text('#!/bin/sh\n[ "$1 $2" = "create -f" ] && echo created\n')
    (folder / "kubectl").chmod(0o755)
    words = ["--nodes", "2", "--image", "x", "--submit", "--json", "My_Train.py"]
    assert main(["launch", "kubernetes", *words]) == 0
    done = json.loads(capsys.readouterr().out)
    assert (done["file"], done["submitted"]) == ("my-train.yaml", "created")
    assert (folder / "my-train.yaml").read_text() == done["text"]


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (["--name", "My_Train"], "PL369", "--name 'My_Train'"),
        (["--name", "a" * 47], "PL369", "--name"),
        (["--mem", "200 GB"], "PL369", "--mem '200 GB'"),
        (["--shm", "lots"], "PL369", "--shm 'lots'"),
        (["--volume", "data"], "PL369", "--volume 'data'"),
        (["--image", "a b"], "PL369", "--image 'a b'"),
        (["--mem", "8Gi"], "PL369", "--shm 8Gi in --mem 8Gi"),
        (["--user", "0"], "PL369", "--user 0"),
        (["--option", "spot=yes"], "PL369", "--option 'spot=yes'"),
        (["--option", "toleration=gpu"], "PL369", "--option 'toleration=gpu'"),
        (["--grace-s", "5"], "PL366", "--grace-s 5"),
        (["--submit"], "PL367", "kubectl is not on this machine's PATH"),
    ],
)
def test_mistakes(
    folder: Path, words: list[str], code: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    image = [] if "--image" in words else ["--image", "x"]
    assert main(["launch", "kubernetes", "--nodes", "2", *image, *words, "My_Train.py"]) == 2
    error = capsys.readouterr().err
    assert told in error
    assert f"[{code}]" in error
