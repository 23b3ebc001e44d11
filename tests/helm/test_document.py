# SPDX-License-Identifier: Apache-2.0
"""The commands of docs/kubernetes.md as a newcomer types them, one after the other, on the tests' cluster."""

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
DOCUMENT = (ROOT / "docs" / "kubernetes.md").read_text()
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


@pytest.mark.parametrize("release", [HELM_3, HELM_4], ids=["helm-3", "helm-4"])
def test_the_commands(cluster: Cluster, tmp_path: Path, release: Release) -> None:
    """All of them work as they stand, and in the end nothing of the chart is left."""
    surroundings = {
        **SURROUNDINGS,
        "KUBECONFIG": str(cluster.kubeconfig(tmp_path)),
        "HOME": str(tmp_path),
        "PATH": f"{helm(release).parent}:{SURROUNDINGS['PATH']}",
    }
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
        done = subprocess.run(
            ["bash", "-c", line], cwd=ROOT, env=surroundings, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
        if line.startswith("helm upgrade"):
            printed = done.stdout
        if line.startswith("helm test k3"):
            assert line in printed, "the chart itself says how it is tested"
    left = [
        one["metadata"]["name"]
        for kind in cluster.api.kinds
        for one in cluster.store.list(kind.plural)
        if kind.kind not in ("Namespace", "Secret")
    ]
    assert left == ["verifications"]
