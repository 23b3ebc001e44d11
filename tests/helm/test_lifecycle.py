# SPDX-License-Identifier: Apache-2.0
"""A release from its install to its end, by a real Helm, on a cluster with GPUs."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helm.cases import of_profile
from tests.helm.cluster.controllers import Node, gpus
from tests.helm.cluster.running import Cluster, running_cluster
from tests.helm.programs import HELM_3, HELM_4, Release, kubectl
from tests.helm.rendering import CHART, Refused, merged, ran
from tests.surroundings import SURROUNDINGS

GPU_NODE = Node("gpu-1", labels={"amd.com/gpu.device-id": "74a5"}, taints=("amd.com/gpu",))
OTHER_GPU_NODE = Node("gpu-2", labels={"amd.com/gpu.device-id": "74a5"}, taints=("amd.com/gpu",))
CPU_NODE = Node("cpu-1", gpus=0)
NAME = "k3-kimi-k3-gfx942"
DOWNLOADED = {
    "weights": {"acceptLossy": True},
    "model": {"download": {"enabled": True, "revision": 40 * "a"}},
    "storage": {"cache": {"persistent": True}},
}

Helm = Callable[..., str]


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """One node with eight MI325X, and one without GPUs."""
    with running_cluster([GPU_NODE, CPU_NODE]) as running:
        yield running


@pytest.fixture
def helm(cluster: Cluster, tmp_path: Path) -> Helm:
    """Helm on that cluster; keyword ``values`` are those of the chart."""
    kubeconfig = cluster.kubeconfig(tmp_path)

    def run(*arguments: Any, values: dict[str, Any] | None = None, release: Release = HELM_4) -> str:
        given = {"KUBECONFIG": str(kubeconfig), "HOME": str(tmp_path)}
        if values is not None:
            arguments = (*arguments, "--values", "-")
        text = None if values is None else yaml.safe_dump(values)
        return ran(*map(str, arguments), release=release, given=given, text=text)

    return run


def running(cluster: Cluster) -> list[dict[str, Any]]:
    """The pods that hold GPUs and are ready."""
    return [pod for pod in cluster.store.list("pods") if gpus(pod) and pod["status"]["phase"] == "Running"]


WAIT = ("--wait", "--timeout", "30s")
SHORT = ("--wait", "--timeout", "4s")


@pytest.mark.parametrize("release", [HELM_3, HELM_4], ids=["helm-3", "helm-4"])
def test_a_whole_life(cluster: Cluster, helm: Helm, release: Release) -> None:
    """Install, upgrade, rollback, test, uninstall; nothing of it is left but what hooks leave."""
    values = of_profile("ep8")
    assert "A start takes up to 7200 s" in helm("install", "k3", CHART, *WAIT, values=values, release=release)
    (first,) = running(cluster)
    changed = merged(values, {"overrides": {"max-model-len": 65536}})
    helm("upgrade", "k3", CHART, *WAIT, values=changed, release=release)
    (second,) = running(cluster)
    assert "--set=max-model-len=65536" in second["spec"]["containers"][0]["args"]
    helm("rollback", "k3", 1, *WAIT, release=release)
    (third,) = running(cluster)
    assert third["spec"] == first["spec"]
    assert f"log of {NAME}-test" in helm("test", "k3", "--logs", "--timeout", "20s", release=release)
    helm("uninstall", "k3", *WAIT, release=release)
    kinds = [kind.plural for kind in cluster.api.kinds]
    left = [found["metadata"]["name"] for plural in kinds for found in cluster.store.list(plural)]
    assert sorted(left) == ["default", f"{NAME}-test", "kube-system"]


def test_a_test_that_fails(cluster: Cluster, helm: Helm) -> None:
    """`helm test` says so by its exit code."""
    helm("install", "k3", CHART, *WAIT, values=of_profile("ep8"))
    cluster.failing.add(f"{NAME}-test")
    with pytest.raises(Refused, match="failed"):
        helm("test", "k3", "--timeout", "20s")


@pytest.fixture
def previous(tmp_path: Path) -> Path:
    """The chart as it was in the version before: another number, and another pod."""
    chart = tmp_path / "previous"
    shutil.copytree(CHART, chart)
    told = yaml.safe_load((chart / "Chart.yaml").read_text())
    (chart / "Chart.yaml").write_text(yaml.safe_dump({**told, "version": "0.0.9"}))
    pod = chart / "templates" / "_pod.tpl"
    pod.write_text(pod.read_text().replace("periodSeconds: 60", "periodSeconds: 59"))
    return chart


def rolling(chart: Path) -> Path:
    """The same chart, with Kubernetes' own default of a rollout."""
    deployment = chart / "templates" / "deployment.yaml"
    text = deployment.read_text().replace("{type: Recreate}", "{type: RollingUpdate}")
    assert "RollingUpdate" in text
    deployment.write_text(text)
    return chart


def test_an_upgrade_does_not_wait_for_its_own_gpus(cluster: Cluster, helm: Helm, previous: Path) -> None:
    """The node has eight GPUs, and the old pod holds them (case 16); with a rolling update it never ends."""
    helm("install", "k3", previous, *WAIT, values=of_profile("ep8"))
    (old,) = running(cluster)
    helm("upgrade", "k3", CHART, *WAIT, values=of_profile("ep8"))
    (new,) = running(cluster)
    assert new["metadata"]["uid"] != old["metadata"]["uid"]
    with pytest.raises(Refused, match="context deadline exceeded"):
        helm("upgrade", "k3", rolling(previous), *SHORT, values=of_profile("ep8"))


def test_an_upgrade_does_not_wait_for_its_own_volume(tmp_path: Path, previous: Path) -> None:
    """A second node has GPUs, but the volume is the first one's (case 17)."""
    with running_cluster([GPU_NODE, OTHER_GPU_NODE]) as cluster:
        given = {"KUBECONFIG": str(cluster.kubeconfig(tmp_path)), "HOME": str(tmp_path)}

        def helm(command: str, chart: Path, *wait: str) -> None:
            ran(command, "k3", chart, *wait, "--values", "-", given=given, text=yaml.safe_dump(DOWNLOADED))

        helm("install", previous, *WAIT)
        (old,) = running(cluster)
        helm("upgrade", CHART, *WAIT)
        (new,) = running(cluster)
        assert new["metadata"]["uid"] != old["metadata"]["uid"]
        with pytest.raises(Refused, match="context deadline exceeded"):
            helm("upgrade", rolling(previous), *SHORT)


def test_the_checkpoint_outlives_the_release(cluster: Cluster, helm: Helm) -> None:
    """Hours of download are not thrown away; what was compiled is."""
    helm("install", "k3", CHART, *WAIT, values=DOWNLOADED)
    helm("uninstall", "k3", *WAIT)
    assert [claim["metadata"]["name"] for claim in cluster.store.list("persistentvolumeclaims")] == [
        f"{NAME}-model"
    ]


def test_another_revision_is_another_job(cluster: Cluster, helm: Helm) -> None:
    """A Job's pod cannot be changed, so an upgrade to another revision would be refused by Kubernetes."""
    helm("install", "k3", CHART, *WAIT, values=DOWNLOADED)
    (first,) = cluster.store.list("jobs")
    helm(
        "upgrade",
        "k3",
        CHART,
        *WAIT,
        values=merged(DOWNLOADED, {"model": {"download": {"revision": 40 * "b"}}}),
    )
    (second,) = cluster.store.list("jobs")
    assert first["metadata"]["name"] != second["metadata"]["name"]


def test_nodes_with_other_gpus(tmp_path: Path) -> None:
    """A profile for 256 GiB does not start on MI300X, where it would fail an hour later."""
    other = Node("mi300x", labels={"amd.com/gpu.device-id": "74a1"}, taints=("amd.com/gpu",))
    with running_cluster([other]) as cluster:
        given = {"KUBECONFIG": str(cluster.kubeconfig(tmp_path)), "HOME": str(tmp_path)}
        with pytest.raises(Refused, match="context deadline exceeded"):
            ran(
                *("install", "k3", CHART, *SHORT, "--values", "-"),
                given=given,
                text=yaml.safe_dump(of_profile("ep8")),
            )
        assert running(cluster) == []


def test_the_cluster_is_strict(cluster: Cluster, helm: Helm, previous: Path) -> None:
    """Else an install would show nothing: a misspelt field is refused, as a real API server does."""
    pod = previous / "templates" / "_pod.tpl"
    pod.write_text(pod.read_text().replace("enableServiceLinks", "enableServiceLink"))
    with pytest.raises(Refused, match="enableServiceLink"):
        helm("install", "k3", previous, *WAIT, values=of_profile("ep8"))
    assert cluster.store.list("deployments") == []


def test_an_old_cluster(tmp_path: Path) -> None:
    """Before 1.29 the sidecar would be an init container that never ends, and the pod never start."""
    with running_cluster([GPU_NODE], minor="1.28") as cluster:
        given = {"KUBECONFIG": str(cluster.kubeconfig(tmp_path)), "HOME": str(tmp_path)}
        with pytest.raises(Refused, match=r"incompatible with Kubernetes v1\.28"):
            ran(
                *("install", "k3", CHART, "--values", "-"),
                given=given,
                text=yaml.safe_dump(of_profile("ep8")),
            )


def test_a_claim_of_one_node_for_several_replicas(cluster: Cluster, helm: Helm) -> None:
    """Only the cluster knows what an existing claim can do, and Helm asks it."""
    kinds = {kind.kind: kind for kind in cluster.api.kinds}
    claim = {"metadata": {"name": "models"}, "spec": {"accessModes": ["ReadWriteOnce"]}}
    cluster.store.create(kinds["PersistentVolumeClaim"], "default", claim)
    values = {**of_profile("ep8"), "model": {"existingClaim": "models"}, "replicas": 2}
    with pytest.raises(Refused, match="models is \\[ReadWriteOnce\\], which one node attaches"):
        helm("install", "k3", CHART, values=values)
    helm("install", "k3", CHART, *WAIT, values={**values, "replicas": 1})


def test_the_commands_of_the_notes(cluster: Cluster, helm: Helm, tmp_path: Path) -> None:
    """Names in them are those of the release's objects: kubectl finds what they point at."""
    notes = helm("install", "k3", CHART, *WAIT, values=of_profile("ep8"))
    named = set(re.findall(r"(?:deploy|service)/[a-z0-9-]+", notes))
    assert named == {f"deploy/{NAME}", f"service/{NAME}-sidecar"}
    for name in named:
        done = subprocess.run(
            [kubectl(), "get", name, "--output", "name"],
            env={**SURROUNDINGS, "KUBECONFIG": str(tmp_path / "kubeconfig")},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
