"""The manifests of docs/manifests: valid by the schemas of Kubernetes and by systemd, and shown by the pages."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from agents import agent, answers, until
from cli_runs import writing
from lastgood.errors import Refused
from lastgood.format import layout
from lastgood.io.machine import NODE
from lastgood.loop.preemption import Preemption
from lastgood.policy.recovery import GAVE_UP, PREEMPTED
from lastgood.policy.retention import KEEP
from lastgood.run import agent_link, agent_messages, memory_place, peer_opening
from lastgood.supervisor.arguments import Job, parsed

DOCS = Path(__file__).resolve().parents[2] / "docs"
SIDECAR, UNIT = DOCS / "manifests/agent-sidecar.yaml", DOCS / "manifests/lastgood-agent.service"
SUPERVISED, NODES = DOCS / "manifests/supervised-job.yaml", DOCS / "manifests/supervised-nodes.yaml"
AGENTS = DOCS / "manifests/supervised-agents.yaml"
NATIVE_SIDECARS = (1, 29)
"""The first version of Kubernetes that has them without a feature gate."""


def job(file: Path = SIDECAR) -> dict[str, Any]:
    return [*yaml.safe_load_all(file.read_text())][-1]


def agent_container(file: Path = SIDECAR) -> dict[str, Any]:
    (container,) = job(file)["spec"]["template"]["spec"]["initContainers"]
    return container


def fields_of(container: dict[str, Any]) -> dict[str, str]:
    """The variables of a container that come by the downward API, and the field of the pod of each."""
    return {one["name"]: one["valueFrom"]["fieldRef"]["fieldPath"] for one in container["env"] if "valueFrom" in one}


def errors_of(manifest: dict[str, Any]) -> set[str]:
    """What is wrong with a manifest by the strict schema of each version of Kubernetes that has native sidecars."""
    validator = pytest.importorskip("kubernetes_validate", reason="needs kubernetes-validate: pip install '.[dev]'")
    versions = [one for one in validator.utils.all_versions() if tuple(map(int, one.split(".")))[:2] >= NATIVE_SIDECARS]
    assert len(versions) >= 9
    found = set()
    for version in versions:
        try:
            validator.validate(manifest, version, strict=True)
        except validator.ValidationError as error:
            found.add(error.message)
    return found


def test_every_kubernetes_with_native_sidecars_accepts_the_manifest() -> None:
    assert errors_of(job()) == set()


def test_every_kubernetes_accepts_the_manifest_of_a_supervised_job() -> None:
    manifest = yaml.safe_load(SUPERVISED.read_text())
    assert errors_of(manifest) == set()
    codes = manifest["spec"]["podFailurePolicy"]["rules"][0]["onExitCodes"]["values"]
    assert codes == sorted({Refused.exit_code, GAVE_UP}), "the codes after which another pod would end in the same way"


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, Any], int], Job]:
    """The arguments of the container of a Job, taken as `lastgood run` takes them in the pod of an index."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()

    def taken(manifest: dict[str, Any], index: int) -> Job:
        (container,) = manifest["spec"]["template"]["spec"]["containers"]
        program, command, *arguments = container["command"]
        assert (program, command) == ("lastgood", "run")
        return parsed([one.replace("$(JOB_COMPLETION_INDEX)", str(index)) for one in arguments], {})

    return taken


@pytest.mark.parametrize("file", [SUPERVISED, NODES, AGENTS])
def test_a_supervised_job_has_the_time_to_save_when_its_pod_ends(
    file: Path, started: Callable[[dict[str, Any], int], Job]
) -> None:
    manifest = job(file)
    taken = started(manifest, 0)
    assert taken.program.arguments == ["--run", "/runs/gpt"]
    grace_seconds = int(re.findall(r"Preemption\(grace_seconds=(\d+)\)", (DOCS / "kubernetes.md").read_text())[0])
    ends_seconds = manifest["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    assert grace_seconds < taken.shutdown_seconds < ends_seconds


@pytest.mark.parametrize("file", [NODES, AGENTS])
def test_the_pods_of_a_job_on_several_nodes_find_each_other(
    file: Path, started: Callable[[dict[str, Any], int], Job]
) -> None:
    service, manifest = yaml.safe_load_all(file.read_text())
    assert errors_of(service) == errors_of(manifest) == set()
    name, spec, pod = manifest["metadata"]["name"], manifest["spec"], manifest["spec"]["template"]["spec"]
    assert (spec["completionMode"], service["spec"]["clusterIP"]) == ("Indexed", "None")
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": name}
    for index in range(spec["completions"]):
        found = started(manifest, index).rendezvous
        assert found is not None and found.node_rank == index
        assert found.settings.least == found.settings.most == spec["completions"] == spec["parallelism"]
        assert found.settings.endpoint == f"{name}-0.{pod['subdomain']}:29500"
    assert pod["subdomain"] == service["metadata"]["name"]
    (container,) = pod["containers"]
    assert fields_of(container)[NODE] == "spec.nodeName"
    (affinity,) = pod["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert affinity["labelSelector"]["matchLabels"] == service["spec"]["selector"]


@pytest.mark.parametrize("file", [NODES, AGENTS])
def test_a_job_on_several_nodes_ends_only_after_it_was_given_up(file: Path) -> None:
    """Not with 3: a new pod that joins while the job before it still ends is refused with that."""
    manifest = job(file)
    by_code = {
        rule["action"]: rule["onExitCodes"]["values"]
        for rule in manifest["spec"]["podFailurePolicy"]["rules"]
        if "onExitCodes" in rule
    }
    assert by_code == {"FailJob": [GAVE_UP], "Ignore": [PREEMPTED]} and Preemption().exit_code == PREEMPTED


@pytest.mark.parametrize(("part", "wrong"), [("startupProbe", {"exec": "test"}), ("restartPolicies", "Always")])
def test_the_schema_finds_a_wrong_field_of_the_sidecar(part: str, wrong: object) -> None:
    manifest = job()
    manifest["spec"]["template"]["spec"]["initContainers"][0][part] = wrong
    assert errors_of(manifest)


@pytest.mark.parametrize("file", [SIDECAR, AGENTS])
def test_the_agent_and_the_trainer_share_user_memory_and_node_name(file: Path) -> None:
    pod = job(file)["spec"]["template"]["spec"]
    (trainer,) = pod["containers"]
    sidecar = agent_container(file)
    assert (
        sidecar["restartPolicy"] == "Always" and pod["shareProcessNamespace"] and "runAsUser" in pod["securityContext"]
    )
    assert sidecar["env"] == trainer["env"] and sidecar["image"] == trainer["image"]
    assert [one for one in trainer["volumeMounts"] if one["mountPath"] != "/dev/shm"] == sidecar["volumeMounts"]
    assert {memory_place.VARIABLE, NODE} <= {one["name"] for one in sidecar["env"]}


def test_the_agents_of_several_pods_are_reached_and_know_their_zone() -> None:
    """Kubernetes copies the zone and the region of a node to its pods, and no rack: the page had named that label."""
    sidecar, pod = agent_container(AGENTS), job(AGENTS)["spec"]["template"]["spec"]
    zone, region = "topology.kubernetes.io/zone", "topology.kubernetes.io/region"
    fields = fields_of(sidecar)
    assert fields[peer_opening.ADDRESS] == "status.podIP"
    assert fields[peer_opening.variable("zone")] == f"metadata.labels['{zone}']"
    assert pod["topologySpreadConstraints"][0]["topologyKey"] == zone
    named = "".join(path.read_text() for path in (DOCS / "agent.md", DOCS / "kubernetes.md", AGENTS))
    assert set(re.findall(r"labels\['([^']+)'\]", named)) <= {zone, region}
    for part in ("command", "startupProbe", "lifecycle"):
        assert sidecar[part] == agent_container()[part], "they were run in a shell"


@pytest.mark.slow
def test_the_commands_of_the_sidecar_copy_memory_when_the_pod_ends(tmp_path: Path, memory: Path) -> None:
    """Probe and hook run in a real shell against a real agent. A save in memory only is on the disk afterwards."""
    home = tmp_path / "gpt"
    writing(home, 1)
    folder = Path(memory_place.folder_of(home))
    memory_place.make(str(folder))
    shutil.copytree(home, folder, dirs_exist_ok=True)
    for one in home.glob("gen/*"):
        shutil.rmtree(one)
    place = agent_messages.CopyTo(url=str(home), keep=KEEP)
    spec = agent_messages.AgentSpec(format=layout.FORMAT, places=[place], order=0, spill=None)
    (folder / agent_link.SPEC).write_bytes(layout.encode(spec))
    (tmp_path / "lastgood").write_text(f'#!/bin/sh\nexec {sys.executable} -m lastgood "$@"\n')
    (tmp_path / "lastgood").chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}

    def run(command: list[str]) -> int:
        placed = [one.replace("/runs/gpt", str(home)).replace("/memory", str(memory)) for one in command]
        return subprocess.run(placed, env=environment, timeout=60).returncode

    probe = agent_container()["startupProbe"]["exec"]["command"]
    hook = agent_container()["lifecycle"]["preStop"]["exec"]["command"]
    assert run(probe) != 0, "no agent listens yet"
    with agent(folder):
        until(lambda: answers(folder))
        assert run(probe) == 0
        assert run(hook) == 0
    assert list(home.glob("gen/*/COMMIT.json")) and not folder.exists()
    assert run(hook) == 0, "it ends where there is no agent any more"


def test_the_unit_is_valid_by_systemd(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("needs systemd-analyze: apt-get install systemd")
    unit = tmp_path / UNIT.name
    unit.write_text(UNIT.read_text().replace("/opt/venv/bin/lastgood", sys.executable))
    ended = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, [line for line in ended.stderr.splitlines() if UNIT.name in line]) == (0, [])


@pytest.mark.parametrize(("file", "language"), [(SIDECAR, "yaml"), (UNIT, "ini")])
def test_the_page_of_the_agent_shows_each_manifest_as_it_is(file: Path, language: str) -> None:
    shown = re.findall(rf"```{language}\n(.*?)```", (DOCS / "agent.md").read_text(), re.DOTALL)
    assert shown == [file.read_text()]
