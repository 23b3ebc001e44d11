# SPDX-License-Identifier: Apache-2.0
"""A release from its install to its end, by a real Helm, on a cluster with GPUs."""

from __future__ import annotations

import json
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
from tests.helm.previous import unpacked
from tests.helm.programs import HELM_3, HELM_4, Release, kubectl
from tests.helm.rendering import CHART, Refused, merged, one, ran, rendered
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


DOCS = CHART.parents[1] / "docs" / "kubernetes.md"
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


VERIFIED = merged(of_profile("ep8"), {"verify": {"enabled": True}})


def started(cluster: Cluster) -> list[str]:
    """The tests' pods, in the order in which they were made."""
    pods = [pod for pod in cluster.store.list("pods") if pod["spec"].get("restartPolicy") == "Never"]
    pods.sort(key=lambda pod: int(pod["metadata"]["resourceVersion"]))
    return [pod["metadata"]["name"] for pod in pods]


@pytest.mark.parametrize("release", [HELM_3, HELM_4], ids=["helm-3", "helm-4"])
def test_the_verifications(cluster: Cluster, helm: Helm, release: Release) -> None:
    """After the questions, beside an engine that has all GPUs; both logs are told, a second time as well."""
    notes = helm("install", "k3", CHART, *WAIT, values=VERIFIED, release=release)
    (command,) = [line.split()[1:] for line in notes.splitlines() if line.strip().startswith("helm test")]
    assert command == ["test", "k3", "--namespace", "default", "--logs", "--timeout", "15300s"]
    for _ in range(2):
        told = helm(*command, release=release)
        assert told.index(f"log of {NAME}-test") < told.index(f"log of {NAME}-verify")
        assert started(cluster) == [f"{NAME}-test", f"{NAME}-verify"]
    cluster.failing.add(f"{NAME}-verify")
    with pytest.raises(Refused, match=f"log of {NAME}-verify"):
        helm(*command, release=release)
    (engine,) = running(cluster)
    assert engine["status"]["nodeName"] == "gpu-1"


@pytest.mark.parametrize("release", [HELM_3, HELM_4], ids=["helm-3", "helm-4"])
def test_no_verifications_of_what_does_not_answer(cluster: Cluster, helm: Helm, release: Release) -> None:
    """The first test fails: the second, which takes hours, is not begun."""
    helm("install", "k3", CHART, *WAIT, values=VERIFIED, release=release)
    cluster.failing.add(f"{NAME}-test")
    with pytest.raises(Refused, match=f"log of {NAME}-test"):
        helm("test", "k3", "--logs", "--timeout", "20s", release=release)
    assert started(cluster) == [f"{NAME}-test"]


def test_the_kernel_while_nobody_is_served(cluster: Cluster, helm: Helm) -> None:
    """Without replicas a GPU is free for it; the test that asks the engine would fail and is left out."""
    notes = helm("install", "k3", CHART, *WAIT, values={**VERIFIED, "replicas": 0})
    (command,) = [line.split()[1:] for line in notes.splitlines() if line.strip().startswith("helm test")]
    assert command[-2:] == ["--filter", f"name={NAME}-verify"]
    assert f"log of {NAME}-verify" in helm(*command)
    (pod,) = [pod for pod in cluster.store.list("pods") if gpus(pod)]
    assert (gpus(pod), pod["status"]["nodeName"]) == (1, "gpu-1")


def test_the_verifications_are_where_the_engine_is(tmp_path: Path) -> None:
    """The claim with the checkpoint is of that node; a pod without it would run on another one as well."""
    with running_cluster([CPU_NODE, GPU_NODE, OTHER_GPU_NODE]) as cluster:
        given = {"KUBECONFIG": str(cluster.kubeconfig(tmp_path)), "HOME": str(tmp_path)}
        values = yaml.safe_dump({**DOWNLOADED, "verify": {"enabled": True}})
        ran("install", "k3", CHART, *WAIT, "--values", "-", given=given, text=values)
        ran("test", "k3", "--timeout", "20s", given=given)
        nodes = {
            pod["metadata"]["name"]: pod["status"]["nodeName"]
            for pod in cluster.store.list("pods")
            if pod["metadata"]["name"].endswith(("-test", "-verify"))
        }
        assert nodes == {f"{NAME}-test": "cpu-1", f"{NAME}-verify": "gpu-1"}


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


PREVIOUS = {
    "ep8": of_profile("ep8"),
    "a download": DOWNLOADED,
    "secrets": {
        **of_profile("ep8"),
        "tls": {"secretName": "certificate"},
        "auth": {"apiKeySecret": {"name": "clients"}, "sidecarTokenSecret": {"name": "operators"}},
    },
    "names": {**of_profile("ep8"), "fullnameOverride": "f" * 63, "nameOverride": "n" * 63},
}


@pytest.mark.parametrize("release", [HELM_3, HELM_4], ids=["helm-3", "helm-4"])
@pytest.mark.parametrize("case", PREVIOUS)
def test_an_upgrade_from_the_previous_chart(
    cluster: Cluster, helm: Helm, tmp_path: Path, case: str, release: Release
) -> None:
    """The real one, not one made of today's: nothing is changed that cannot be, nothing waits; and back."""
    values = PREVIOUS[case]
    helm("install", "k3", unpacked(tmp_path), *WAIT, values=values, release=release)
    before = {one["metadata"]["name"] for one in cluster.store.list("persistentvolumeclaims")}
    helm("upgrade", "k3", CHART, *WAIT, "--reset-then-reuse-values", release=release)
    assert len(running(cluster)) == 1
    assert {one["metadata"]["name"] for one in cluster.store.list("persistentvolumeclaims")} == before
    helm("test", "k3", "--timeout", "20s", release=release)
    helm("rollback", "k3", 1, *WAIT, release=release)
    assert len(running(cluster)) == 1


def test_what_cannot_change_in_a_group(tmp_path: Path) -> None:
    """The tests' cluster makes no groups: what may not change is compared as rendered."""
    values = of_profile("pp2-tp8")
    old, new = (
        one(rendered(values, chart=chart), "LeaderWorkerSet") for chart in (unpacked(tmp_path), CHART)
    )
    assert old["metadata"]["name"] == new["metadata"]["name"]
    for spec in (old["spec"], new["spec"]):
        del spec["leaderWorkerTemplate"]["leaderTemplate"], spec["leaderWorkerTemplate"]["workerTemplate"]
    assert old["spec"] == new["spec"]


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


@pytest.mark.parametrize("release", [HELM_3, HELM_4], ids=["helm-3", "helm-4"])
@pytest.mark.parametrize(
    "change",
    [
        {},
        {"image": {"engine": {"digest": "sha256:" + 64 * "b"}}},
        {"scheduling": {"nodeSelector": {"amd.com/gpu.device-id": "74a5"}}},
        {"image": {"pullPolicy": "Always"}},
        {"security": {"fsGroup": 20000}},
    ],
    ids=["another version of the chart", "digest", "node selector", "pull policy", "group"],
)
def test_an_upgrade_beside_a_download(
    cluster: Cluster, helm: Helm, previous: Path, change: dict[str, Any], release: Release
) -> None:
    """A Job's pod is immutable: an upgrade that changed one would fail after it has ended the engine."""
    helm("install", "k3", previous, *WAIT, values=DOWNLOADED, release=release)
    helm("upgrade", "k3", CHART, *WAIT, values=merged(DOWNLOADED, change), release=release)
    helm("rollback", "k3", 1, *WAIT, release=release)
    assert len(running(cluster)) == 1


def test_the_download_is_where_its_engine_is(tmp_path: Path) -> None:
    """The claim is of one node; the other one has GPUs as well, and the Job itself asks for none."""
    with running_cluster([OTHER_GPU_NODE, GPU_NODE]) as cluster:
        pod = {kind.kind: kind for kind in cluster.api.kinds}["Pod"]
        taken = {"limits": {"amd.com/gpu": "8"}}
        spec = {
            "containers": [{"name": "other", "image": "x", "resources": taken}],
            "tolerations": [{"key": "amd.com/gpu"}],
        }
        cluster.store.create(pod, "default", {"metadata": {"name": "other", "labels": {}}, "spec": spec})
        given = {"KUBECONFIG": str(cluster.kubeconfig(tmp_path)), "HOME": str(tmp_path)}
        ran(
            *("install", "k3", CHART, *WAIT, "--wait-for-jobs", "--values", "-"),
            given=given,
            text=yaml.safe_dump(DOWNLOADED),
        )
        nodes = {
            one["status"]["nodeName"] for one in cluster.store.list("pods") if "k3" in str(one["metadata"])
        }
        assert nodes == {"gpu-1"}


def test_the_documented_upgrade_knows_new_values(cluster: Cluster, helm: Helm, previous: Path) -> None:
    """A value that the chart before did not have: --reuse-values would leave it out."""
    values = yaml.safe_load((previous / "values.yaml").read_text())
    del values["tls"]
    (previous / "values.yaml").write_text(yaml.safe_dump(values))
    schema = json.loads((previous / "values.schema.json").read_text())
    del schema["properties"]["tls"]
    schema["required"].remove("tls")
    (previous / "values.schema.json").write_text(json.dumps(schema))
    for template in (previous / "templates").rglob("*.*"):
        text = re.sub(r"(\$(root)?)?\.Values\.tls\.", '(dict "secretName" "").', template.read_text())
        template.write_text(text)
    helm("install", "k3", previous, *WAIT, values=of_profile("ep8"))
    with pytest.raises(Refused, match="missing propert"):
        helm("upgrade", "k3", CHART, "--reuse-values")
    command = next(
        line
        for line in DOCS.read_text().splitlines()
        if line.startswith("helm upgrade k3") and "--set" in line
    )
    arguments = command.split()[1:]
    arguments[arguments.index("helm/kimi-k3-gfx942")] = str(CHART)
    arguments[arguments.index("kimi-k3")] = "default"
    helm(*arguments, *WAIT)


@pytest.mark.parametrize("name", ["k3.prod", "3k", "k" * 50])
def test_odd_names(cluster: Cluster, helm: Helm, name: str) -> None:
    """Helm takes names that a Service cannot have."""
    helm("install", name, CHART, *WAIT, values=of_profile("ep8"))
    assert len(running(cluster)) == 1


def test_two_long_names_alike(cluster: Cluster, helm: Helm) -> None:
    """What is cut must still tell two releases apart."""
    with running_cluster([GPU_NODE, OTHER_GPU_NODE, CPU_NODE]):
        for end in "ab":
            name = f"kimi-k3-gfx942-production-us-east-1-alpha-{end}"
            helm("install", name, CHART, values={**of_profile("ep8"), "replicas": 0})
    assert len(cluster.store.list("deployments")) == 2


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
