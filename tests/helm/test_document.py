# SPDX-License-Identifier: Apache-2.0
"""The commands of docs/kubernetes.md and docs/runbook.md as people type them, on the tests' cluster."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helm.cluster.controllers import Node
from tests.helm.cluster.running import Cluster, running_cluster
from tests.helm.programs import HELM_3, HELM_4, Release, helm
from tests.helm.rendering import CHART
from tests.surroundings import SURROUNDINGS

ROOT = CHART.parents[1]
DOCUMENT, RUNBOOK = ((ROOT / "docs" / f"{name}.md").read_text() for name in ("kubernetes", "runbook"))
PARTS = ("Try it, without a GPU", "Install", "Verify", "Upgrade, roll back, uninstall")
NOT_HERE = re.compile(r"kubectl .*exec -it ")
"""There is no container to go into."""


def commands(part: str) -> list[str]:
    """The lines of a part's commands, each whole."""
    text = DOCUMENT.split(f"\n## {part}\n")[1].split("\n## ")[0]
    blocks = re.findall(r"^ *```(?:sh)?\n(.*?)^ *```", text, re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.replace("\\\n", " ").splitlines() if line.strip()]


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """One node with GPUs, one without."""
    gpu = Node("gpu-1", labels={"amd.com/gpu.device-id": "74a5"}, taints=("amd.com/gpu",))
    with running_cluster([gpu, Node("cpu-1", gpus=0)]) as running:
        yield running


def typed(line: str, cluster: Cluster, home: Path, release: Release = HELM_4) -> str:
    """What a line prints, which must work."""
    surroundings = {
        **SURROUNDINGS,
        "KUBECONFIG": str(cluster.kubeconfig(home)),
        "HOME": str(home),
        "PATH": f"{helm(release).parent}:{SURROUNDINGS['PATH']}",
    }
    done = subprocess.run(
        ["bash", "-c", line], cwd=ROOT, env=surroundings, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.mark.parametrize("release", [HELM_3, HELM_4], ids=["helm-3", "helm-4"])
def test_the_commands(cluster: Cluster, tmp_path: Path, release: Release) -> None:
    """All of them work as they stand, one after the other, and in the end nothing of the chart is left."""
    (kind,) = [kind for kind in cluster.api.kinds if kind.kind == "PersistentVolumeClaim"]
    # The operator's own, and what a download would have left.
    for name in ("verifications", "k3-kimi-k3-gfx942-model"):
        claim = {"metadata": {"name": name}, "spec": {"accessModes": ["ReadWriteOnce"]}}
        cluster.store.create(kind, "kimi-k3", claim)
    lines = [line for part in PARTS for line in commands(part)]
    assert len(lines) > 10
    printed = ""
    for line in map(str.strip, lines):
        if NOT_HERE.match(line):
            continue
        told = typed(line, cluster, tmp_path, release)
        if line.startswith("helm upgrade"):
            printed = told
        if line.startswith("helm test k3"):
            assert line in printed, "the chart itself says how it is tested"
    left = [
        one["metadata"]["name"]
        for kind in cluster.api.kinds
        for one in cluster.store.list(kind.plural)
        if kind.kind not in ("Namespace", "Secret")
    ]
    assert left == ["verifications"]


def looking() -> list[str]:
    """The runbook's questions to a cluster about the release's objects."""
    found = re.findall(r"\bkubectl -n models (?:get|describe) [^`\n|;}]+", RUNBOOK)
    return sorted(set(map(str.strip, found)))


def test_the_runbooks_questions(cluster: Cluster, tmp_path: Path) -> None:
    """Whoever is called at night asks a release named as there, and gets to see its objects."""
    values = "--set=model.hostPath=/models,weights.acceptLossy=true,security.gpuGroups={993}"
    typed(
        f"helm install k3 {CHART} --namespace models --create-namespace --wait '{values}'", cluster, tmp_path
    )
    lines = looking()
    assert len(lines) >= 5
    for line in lines:
        assert "k3-kimi-k3-gfx942" in typed(line, cluster, tmp_path), line
