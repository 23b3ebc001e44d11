# SPDX-License-Identifier: Apache-2.0
"""What of the pod and around it decides whether it starts, stays and ends well."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.helm.cases import CASES, EVERYTHING, GATEWAYS, PROFILES, of_profile
from tests.helm.rendering import MONITORING, containers, engine_pod, merged, one, pod_templates, rendered

APIS = (*MONITORING, *GATEWAYS)


@pytest.mark.parametrize("case", CASES)
def test_the_order_of_the_containers(case: str) -> None:
    """The sidecar is first and stays; what must hold before a start comes before the engine."""
    download = CASES[case].get("model", {}).get("download", {}).get("enabled", False)
    for _, template in pod_templates(rendered(CASES[case], apis=APIS)):
        spec = template["spec"]
        first, *others = spec["initContainers"]
        assert (first["name"], first["restartPolicy"]) == ("sidecar", "Always")
        assert [each["name"] for each in others] == [*(["checkpoint"] if download else []), "preflight"]
        assert not [each for each in others if "restartPolicy" in each]
        (engine,) = spec["containers"]
        assert engine["name"] == "engine"
        # After SIGTERM the supervisor says "not ready" and waits: a preStop hook would wait once more.
        assert "lifecycle" not in engine
        assert engine["startupProbe"]["httpGet"]["path"] == "/startupz"
        assert engine["readinessProbe"]["httpGet"]["path"] == "/readyz"
        assert engine["livenessProbe"]["exec"]["command"] == ["kimi-k3", "healthcheck", "--alive"]


@pytest.mark.parametrize("profile", PROFILES)
def test_shared_memory(profile: str) -> None:
    """RCCL needs more than Kubernetes' 64 MiB; it is memory of the pod, within its limit."""
    found = rendered(of_profile(profile))
    (volume,) = [each for each in engine_pod(found)["spec"]["volumes"] if each["name"] == "shared-memory"]
    assert volume["emptyDir"]["medium"] == "Memory"
    assert volume["emptyDir"]["sizeLimit"]
    mounts = containers(found)["engine"]["volumeMounts"]
    assert {"name": "shared-memory", "mountPath": "/dev/shm"} in mounts


def test_where_it_may_run() -> None:
    """Each of the operator's words about places is in the pod."""
    spec = engine_pod(rendered(EVERYTHING, apis=APIS))["spec"]
    wanted = spec["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    (term,) = wanted["nodeSelectorTerms"]
    assert [(each["key"], each["values"]) for each in term["matchExpressions"]] == [
        ("amd.com/gpu.product-name", ["AMD_Instinct_MI325_OAM"]),
        ("amd.com/gpu.compute-memory-partition", ["spx_nps1"]),
    ]
    assert spec["nodeSelector"] == {"pool": "gpu"}
    assert spec["priorityClassName"] == "serving"
    assert spec["securityContext"]["supplementalGroups"] == [993, 44]
    (spread,) = spec["topologySpreadConstraints"]
    labels = engine_pod(rendered(EVERYTHING, apis=APIS))["metadata"]["labels"]
    assert spread["labelSelector"]["matchLabels"].items() <= labels.items()
    away = {each["key"]: each for each in spec["tolerations"]}
    assert away["node.kubernetes.io/unreachable"]["tolerationSeconds"] == 1800
    assert away["amd.com/gpu"]["effect"] == "NoSchedule"


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        ({}, None),
        ({"replicas": 2}, (1, "AlwaysAllow")),
        ({"podDisruptionBudget": {"maxUnavailable": 0}}, (0, "IfHealthyBudget")),
        ({"replicas": 3, "podDisruptionBudget": {"maxUnavailable": 2}}, (2, "AlwaysAllow")),
    ],
)
def test_drains(values: dict[str, Any], wanted: tuple[int, str] | None) -> None:
    """A single pod blocks no drain unless that is asked for, and 0 is a number that was given."""
    budgets = [
        each["spec"]
        for each in rendered(merged(of_profile("ep8"), values))
        if each["kind"] == "PodDisruptionBudget"
    ]
    found = [(each["maxUnavailable"], each["unhealthyPodEvictionPolicy"]) for each in budgets]
    assert found == ([] if wanted is None else [wanted])


@pytest.mark.parametrize("case", CASES)
def test_nothing_comes_or_goes_that_is_not_named(case: str) -> None:
    """Every pod is under a policy for both directions, and none is open to everybody."""
    found = rendered(CASES[case], apis=APIS)
    policies = [each["spec"] for each in found if each["kind"] == "NetworkPolicy"]
    labels = [template["metadata"]["labels"] for _, template in pod_templates(found)]
    labels += [each["metadata"]["labels"] for each in found if each["kind"] == "Pod"]
    labels += [each["spec"]["template"]["metadata"]["labels"] for each in found if each["kind"] == "Job"]
    for pod in labels:
        over = [policy for policy in policies if selects(policy["podSelector"], pod)]
        assert len(over) == 1, pod
        assert over[0]["policyTypes"] == ["Ingress", "Egress"]
    for policy in policies:
        assert all(rule.get("from") for rule in policy["ingress"])
        assert all(rule.get("ports") or rule.get("to") for rule in policy["egress"])


def selects(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    """As Kubernetes reads a selector, of the operators that the chart uses."""
    expressions = selector.get("matchExpressions", [])
    assert {each["operator"] for each in expressions} <= {"In"}, json.dumps(selector)
    return selector.get("matchLabels", {}).items() <= labels.items() and all(
        labels.get(each["key"]) in each["values"] for each in expressions
    )


def test_the_account() -> None:
    """Without a token, and made only where none was named."""
    account = one(rendered(of_profile("ep8")), "ServiceAccount")
    assert account["automountServiceAccountToken"] is False
    named = rendered(merged(of_profile("ep8"), {"serviceAccount": {"name": "serving"}}))
    assert "ServiceAccount" not in {each["kind"] for each in named}
    assert engine_pod(named)["spec"]["serviceAccountName"] == "serving"
