# SPDX-License-Identifier: Apache-2.0
"""Profiles of several nodes: the group of pods, what it needs of its network, and who watches it."""

from __future__ import annotations

import json

import kubernetes_validate
import pytest

from tests.helm.cases import CASES, GATEWAYS, of_profile
from tests.helm.rendering import (
    MINORS,
    MONITORING,
    containers,
    engine_pod,
    merged,
    one,
    pod_templates,
    rendered,
)

APIS = (*MONITORING, *GATEWAYS)
SEVERAL = [name for name in CASES if name in ("pp2-tp8", "dp-ep16", "two-nodes")]


@pytest.mark.parametrize("minor", MINORS)
@pytest.mark.parametrize("case", SEVERAL)
def test_pods_of_a_group(case: str, minor: str) -> None:
    """A LeaderWorkerSet's own schema is not at hand, but those of the pods that it makes are."""
    for _, pod in pod_templates(rendered(CASES[case], apis=APIS, minor=minor)):
        kind = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "pod"}, "template": pod}
        kubernetes_validate.validate(kind, minor, strict=True)


@pytest.mark.parametrize("case", SEVERAL)
def test_a_group(case: str) -> None:
    """As many pods as nodes, all at once, restarted by their supervisors; only the first has a Service."""
    found = rendered(CASES[case], apis=APIS)
    assert "Deployment" not in {each["kind"] for each in found}
    spec = one(found, "LeaderWorkerSet")["spec"]
    assert set(spec) == {
        "replicas", "startupPolicy", "rolloutStrategy", "networkConfig", "leaderWorkerTemplate"
    }  # fmt: skip
    assert spec["startupPolicy"] == "LeaderCreated"
    assert spec["rolloutStrategy"]["rollingUpdateConfiguration"] == {"maxUnavailable": 1, "maxSurge": 0}
    group = spec["leaderWorkerTemplate"]
    assert (group["size"], group["restartPolicy"]) == (2, "None")
    leader, worker = group["leaderTemplate"], group["workerTemplate"]
    # The same but for one label and patience: each pod learns from its environment which it is.
    patience = [
        each["spec"]["containers"][0]["startupProbe"].pop("failureThreshold") for each in (leader, worker)
    ]
    assert patience[1] == 2 * patience[0]
    assert leader["spec"] == worker["spec"]
    labels = [each["metadata"]["labels"] for each in (leader, worker)]
    assert [each.pop("app.kubernetes.io/component") for each in labels] == ["engine", "worker"]
    name = one(found, "LeaderWorkerSet")["metadata"]["name"]
    for service in (each for each in found if each["kind"] == "Service"):
        # Its controller makes a Service of that name unless there is one, and the pods find each other by it.
        assert service["metadata"]["name"] != name
        assert service["spec"]["selector"]["app.kubernetes.io/component"] == "engine"
    arguments = containers(found)["engine"]["args"]
    assert "--node-rank=$(LWS_WORKER_INDEX)" in arguments
    assert "--leader-address=$(LWS_LEADER_ADDRESS)" in arguments


def test_what_a_group_needs_of_its_network() -> None:
    """Adapters, an interface and further networks; between its pods every port is open, to nobody else."""
    found = rendered(CASES["two-nodes"], apis=APIS)
    engine = containers(found)["engine"]
    assert engine["resources"]["limits"]["rdma/hca"] == engine["resources"]["requests"]["rdma/hca"] == "8"
    given = {each["name"]: each for each in engine["env"]}
    assert given["NCCL_SOCKET_IFNAME"]["value"] == given["GLOO_SOCKET_IFNAME"]["value"] == "ens5"
    assert given["VLLM_HOST_IP"]["valueFrom"]["fieldRef"]["fieldPath"] == "status.podIP"
    assert engine_pod(found)["metadata"]["annotations"]["k8s.v1.cni.cncf.io/networks"] == "rdma"
    assert "--leader-sidecar=https://$(LWS_LEADER_ADDRESS):8001" in engine["args"]
    assert "--ca-file=/run/secrets/tls/ca.crt" in engine["args"]
    policy = one(found, "NetworkPolicy", "gfx942")["spec"]
    (peers,) = [each["from"] for each in policy["ingress"] if "ports" not in each]
    assert peers == [{"podSelector": policy["podSelector"]}]
    assert policy["egress"][0] == {"to": peers}


def test_a_groups_pods_are_watched() -> None:
    """The others' sidecars are behind no Service."""
    monitor = one(rendered(CASES["pp2-tp8"], apis=APIS), "PodMonitor")["spec"]
    assert monitor["selector"]["matchLabels"]["app.kubernetes.io/component"] == "worker"
    assert "PodMonitor" not in {each["kind"] for each in rendered(CASES["ep8"], apis=APIS)}


def test_the_nodes_network() -> None:
    """Where RDMA needs it; and only for those who need it."""
    host = {"multiNode": {"hostNetwork": True}}
    pod = engine_pod(rendered(merged(of_profile("pp2-tp8"), host)))["spec"]
    assert (pod["hostNetwork"], pod["dnsPolicy"]) == (True, "ClusterFirstWithHostNet")
    (policy,) = [
        each for each in rendered(merged(of_profile("pp2-tp8"), host)) if each["kind"] == "NetworkPolicy"
    ]
    # Such pods are found by no selector, so the test may go anywhere by these ports.
    assert policy["metadata"]["name"].endswith("-test")
    assert [set(each) for each in policy["spec"]["egress"]] == [{"ports"}, {"ports"}]


def test_every_probe_of_a_group_follows_tls() -> None:
    """Of both pods; the second one's metrics are scraped by a monitor of their own."""
    found = rendered(CASES["two-nodes"], apis=APIS)
    for _, pod in pod_templates(found):
        text = json.dumps(pod)
        assert text.count('"scheme": "HTTPS"') == 4
        assert '"scheme": "HTTP"' not in text
    (endpoint,) = one(found, "PodMonitor")["spec"]["podMetricsEndpoints"]
    assert endpoint["scheme"] == "https"
