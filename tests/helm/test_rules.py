# SPDX-License-Identifier: Apache-2.0
"""Values that do not go together are refused in one line that says what to do; beside each, ones that do."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import pytest

from tests.helm.cases import CPU, GATEWAYS, ON_DISK, of_profile
from tests.helm.rendering import CHART, MONITORING, Refused, merged, template

APIS = (*MONITORING, *GATEWAYS)
EP8 = of_profile("ep8")
DOWNLOAD: dict[str, Any] = {
    "weights": {"acceptLossy": True},
    "model": {"download": {"enabled": True, "revision": 40 * "a"}},
}
ROUTE: dict[str, Any] = {"gateway": {"httpRoute": {"enabled": True, "parentRefs": [{"name": "gateway"}]}}}
POOL: dict[str, Any] = {"gateway": {"inferencePool": {"enabled": True, "endpointPicker": {"name": "picker"}}}}


def under(place: tuple[str, ...], value: dict[str, Any]) -> dict[str, Any]:
    """What starts ``ep8``, and the value at that place."""
    for name in reversed(place):
        value = {name: value}
    start = DOWNLOAD if "download" in place else EP8
    return merged(start, value)


class Rule(NamedTuple):
    """Values that are refused, what is said, and the nearest that are not."""

    wrong: dict[str, Any]
    said: str
    right: dict[str, Any]


RULES: dict[str, Rule] = {
    "int4 without consent": Rule(ON_DISK, "set weights.acceptLossy=true to consent", EP8),
    "int4 by choice": Rule(
        {**CPU, "weights": {"format": "int4"}},
        "weights.acceptLossy",
        {**CPU, "weights": {"format": "int4", "acceptLossy": True}},
    ),
    "a rule for scales that there are not": Rule(
        {**ON_DISK, "weights": {"format": "mxfp4", "scaleRule": "mse"}},
        "weights.scaleRule: mse has no effect on mxfp4",
        {**ON_DISK, "weights": {"acceptLossy": True, "scaleRule": "mse"}},
    ),
    "a name by which alerts know others": Rule(
        {**EP8, "fullnameOverride": "k3-sidecar"},
        "give a name that ends otherwise",
        {**EP8, "fullnameOverride": "sidecar-k3"},
    ),
    "an unknown profile": Rule({**EP8, "profile": "ep9"}, '"ep9" is not known; use one of', EP8),
    "two nodes that do not know each other": Rule(
        {**EP8, "profile": "pp2-tp8"}, "auth.sidecarTokenSecret.name: is empty", of_profile("pp2-tp8")
    ),
    "two nodes by an override": Rule(
        {**EP8, "overrides": {"nodes": 2}}, "choose another profile", of_profile("pp2-tp8")
    ),
    "an override that nobody knows": Rule(
        {**EP8, "overrides": {"max-modellen": 4096}},
        "overrides.max-modellen: is not known",
        {**EP8, "overrides": {"max-model-len": 4096}},
    ),
    **{
        f"a setting that is a value, {name}": Rule(
            {**EP8, "overrides": {name: value}}, f"overrides.{name}: the chart has a value", {**EP8, **own}
        )
        for name, value, own in (
            ("weights", "mxfp4", {"weights": {"format": "mxfp4"}}),
            ("scale-rule", "amax", {"weights": {"acceptLossy": True, "scaleRule": "amax"}}),
            ("start-timeout", 3600, {"startup": {"timeoutSeconds": 3600}}),
            ("drain-timeout", 60, {"shutdown": {"drainSeconds": 60}}),
            ("readiness-delay", 20, {"shutdown": {"readinessDelaySeconds": 20}}),
        )
    },
    **{
        f"a secret in {place[0]}": Rule(
            under(place, {name: "secret"}), f"{'.'.join(place)}.{name}: sounds like a secret", right
        )
        for place, name, right in (
            (("engine", "env"), "VLLM_API_KEY", {**EP8, "auth": {"apiKeySecret": {"name": "clients"}}}),
            (
                ("model", "download", "env"),
                "HF_TOKEN",
                merged(DOWNLOAD, {"model": {"download": {"tokenSecret": {"name": "hub"}}}}),
            ),
        )
    },
    "the program's own variable": Rule(
        under(("engine", "env"), {"KIMI_K3_STATE_DIR": "/elsewhere"}),
        "engine.env.KIMI_K3_STATE_DIR: is the program's own",
        under(("engine", "env"), {"NCCL_DEBUG": "INFO"}),
    ),
    **{
        f"a label twice, {place[1]}": Rule(
            under(place, {"app.kubernetes.io/name": "other"}),
            f"{'.'.join(place)}.app.kubernetes.io/name: is set by the chart",
            under(place, {"example.com/name": "other"}),
        )
        for place in (
            ("monitoring", "serviceMonitor", "additionalLabels"),
            ("monitoring", "rules", "additionalLabels"),
            ("monitoring", "dashboards", "labels"),
        )
    },
    "an annotation twice": Rule(
        merged(
            of_profile("pp2-tp8"),
            {"multiNode": {"podAnnotations": {"kubectl.kubernetes.io/default-container": "sidecar"}}},
        ),
        "multiNode.podAnnotations.kubectl.kubernetes.io/default-container: is set by the chart",
        merged(of_profile("pp2-tp8"), {"multiNode": {"podAnnotations": {"example.com/network": "rdma"}}}),
    ),
    **{
        f"a request above its limit, {place}": Rule(
            under((place, "resources"), {"requests": {"memory": "2Gi"}, "limits": {"memory": "1Gi"}}),
            f"{place}.resources.limits.memory: 1Gi is less than the request, 2Gi",
            under((place, "resources"), {"requests": {"memory": "2Gi"}, "limits": {"memory": "2Gi"}}),
        )
        for place in ("sidecar", "verify")
    },
    "a GPU that the engine has": Rule(
        under(("verify", "resources", "limits"), {"amd.com/gpu": 1}),
        "verify.resources.limits: amd.com/gpu is the profile's",
        under(("verify", "resources", "limits"), {"cpu": 4}),
    ),
    "a directory of no claim": Rule(
        {**EP8, "verify": {"enabled": True, "results": {"path": "k3"}}},
        "verify.results.path: is a directory of verify.results.existingClaim, which is empty",
        {**EP8, "verify": {"enabled": True, "results": {"path": "k3", "existingClaim": "results"}}},
    ),
    "results outside of their claim": Rule(
        {**EP8, "verify": {"results": {"path": "../k3", "existingClaim": "results"}}},
        "verify.results.path: ../k3 leaves its claim",
        {**EP8, "verify": {"results": {"path": "..k3/", "existingClaim": "results"}}},
    ),
    "a volume of one pod for a download": Rule(
        merged(DOWNLOAD, {"model": {"download": {"accessModes": ["ReadWriteOncePod"]}}}),
        "model.download.accessModes: ReadWriteOncePod gives the volume to one pod",
        DOWNLOAD,
    ),
    "a network for one node": Rule(
        {**EP8, "multiNode": {"hostNetwork": True}},
        "multiNode.hostNetwork: profile ep8 has one node",
        {**of_profile("pp2-tp8"), "multiNode": {"hostNetwork": True}},
    ),
    "GPUs as adapters": Rule(
        {**of_profile("pp2-tp8"), "multiNode": {"rdmaResources": {"amd.com/gpu": 1}}},
        "multiNode.rdmaResources: amd.com/gpu is the profile's",
        {**of_profile("pp2-tp8"), "multiNode": {"rdmaResources": {"rdma/hca": 1}}},
    ),
    "an interface twice": Rule(
        {
            **of_profile("pp2-tp8"),
            "multiNode": {"networkInterface": "eth0"},
            "engine": {"env": {"NCCL_SOCKET_IFNAME": "eth1"}},
        },
        "engine.env.NCCL_SOCKET_IFNAME: is set by the chart",
        {**of_profile("pp2-tp8"), "engine": {"env": {"NCCL_SOCKET_IFNAME": "eth1"}}},
    ),
    "a cache for two nodes in a volume of one": Rule(
        {**of_profile("pp2-tp8"), "storage": {"cache": {"persistent": True}}},
        "use ReadWriteMany, or a profile of one node",
        {
            **of_profile("pp2-tp8"),
            "storage": {"cache": {"persistent": True, "accessModes": ["ReadWriteMany"]}},
        },
    ),
    "one journal for two nodes": Rule(
        {**of_profile("pp2-tp8"), "storage": {"state": {"persistent": True}}},
        "storage.state.persistent",
        of_profile("pp2-tp8"),
    ),
    "a profile with a draft": Rule({**EP8, "profile": "ep8-dspark"}, "use another profile", EP8),
    "no checkpoint": Rule({"weights": {"acceptLossy": True}}, "nothing says where the checkpoint is", EP8),
    "two checkpoints": Rule(
        merged(EP8, {"model": {"existingClaim": "models"}}),
        "2 sources, model.existingClaim and model.hostPath; leave one",
        merged(EP8, {"model": {"existingClaim": "models", "hostPath": ""}}),
    ),
    "a download of whatever there is": Rule(
        merged(DOWNLOAD, {"model": {"download": {"revision": ""}}}), "give the commit", DOWNLOAD
    ),
    "a download for several nodes into a volume of one": Rule(
        {**DOWNLOAD, "replicas": 2},
        "model.download.accessModes: [ReadWriteOnce] attaches the volume to one node, and 2 pods",
        merged({**DOWNLOAD, "replicas": 2}, {"model": {"download": {"accessModes": ["ReadWriteMany"]}}}),
    ),
    "a cache for several nodes in a volume of one": Rule(
        {**EP8, "replicas": 2, "storage": {"cache": {"persistent": True}}},
        "storage.cache.accessModes",
        {**EP8, "replicas": 2, "storage": {"cache": {"persistent": True, "accessModes": ["ReadWriteMany"]}}},
    ),
    "one journal for several replicas": Rule(
        {**EP8, "replicas": 2, "storage": {"state": {"persistent": True, "accessModes": ["ReadWriteMany"]}}},
        "storage.state.persistent",
        {**EP8, "replicas": 1, "storage": {"state": {"persistent": True}}},
    ),
    "killed before the drain is over": Rule(
        {**EP8, "shutdown": {"graceSeconds": 329}},
        "shutdown.graceSeconds: 329 is less than the 330 s",
        {**EP8, "shutdown": {"graceSeconds": 330}},
    ),
    "killed before a longer drain is over": Rule(
        {**EP8, "shutdown": {"drainSeconds": 600, "graceSeconds": 600}},
        "630 s",
        {**EP8, "shutdown": {"drainSeconds": 570, "graceSeconds": 600}},
    ),
    "a probe that is shorter than the engine's patience": Rule(
        {**EP8, "startup": {"probeSeconds": 7319}},
        "startup.probeSeconds: 7319 is less than the 7320 s",
        {**EP8, "startup": {"timeoutSeconds": 3600, "probeSeconds": 3720}},
    ),
    "shared memory that its limit does not hold": Rule(
        {**EP8, "engine": {"sharedMemory": "1Ti"}},
        "engine.resources.limits.memory: 512Gi does not hold engine.sharedMemory (1Ti)",
        {**EP8, "engine": {"sharedMemory": "511Gi"}},
    ),
    "GPUs by hand": Rule(
        {**EP8, "engine": {"resources": {"limits": {"amd.com/gpu": 4}}}}, "amd.com/gpu is the profile's", EP8
    ),
    "product names without names": Rule(
        {**EP8, "scheduling": {"gpuNodes": "product-name"}},
        "scheduling.productNames: is empty",
        {**EP8, "scheduling": {"gpuNodes": "product-name", "productNames": ["AMD_Instinct_MI325_OAM"]}},
    ),
    "a route of no gateway": Rule(
        merged(merged(EP8, ROUTE), {"gateway": {"httpRoute": {"parentRefs": []}}}),
        "gateway.httpRoute.parentRefs",
        merged(EP8, ROUTE),
    ),
    "a route to pods that expect TLS": Rule(
        merged(merged(EP8, ROUTE), {"tls": {"secretName": "certificate"}}),
        "gateway.httpRoute.enabled: a route speaks plain HTTP",
        merged(EP8, {"tls": {"secretName": "certificate"}}),
    ),
    "a pool of pods that expect TLS": Rule(
        merged(merged(EP8, POOL), {"tls": {"secretName": "certificate"}}),
        "gateway.inferencePool.enabled: a gateway speaks plain HTTP",
        merged(EP8, POOL),
    ),
    "a request above its limit": Rule(
        merged(EP8, {"engine": {"resources": {"limits": {"memory": "256Gi"}}}}),
        "engine.resources.limits.memory: 256Gi is less than the request, 512Gi",
        merged(
            EP8, {"engine": {"resources": {"requests": {"memory": "256Gi"}, "limits": {"memory": "256Gi"}}}}
        ),
    ),
    "a path that leaves its directory": Rule(
        {**EP8, "model": {"hostPath": "/mnt/models/../etc"}},
        "model.hostPath: /mnt/models/../etc leaves its directory",
        {**EP8, "model": {"hostPath": "/mnt/models/..etc/"}},
    ),
    "clients from outside whom the policy keeps out": Rule(
        {**EP8, "service": {"type": "LoadBalancer"}},
        "service.type: LoadBalancer brings clients from outside",
        {
            **EP8,
            "service": {"type": "LoadBalancer"},
            "networkPolicy": {"clients": [{"ipBlock": {"cidr": "10.0.0.0/8"}}]},
        },
    ),
    "a pool without a picker": Rule(
        merged(merged(EP8, POOL), {"gateway": {"inferencePool": {"endpointPicker": {"name": ""}}}}),
        "gateway.inferencePool.endpointPicker.name",
        merged(EP8, POOL),
    ),
}


@pytest.mark.parametrize("rule", RULES)
def test_what_does_not_go_together(rule: str) -> None:
    """Refused before anything is created, and for this reason: the nearest values are taken."""
    wrong, said, right = RULES[rule]
    with pytest.raises(Refused) as refused:
        template(wrong, apis=(*MONITORING, *GATEWAYS))
    text = " ".join(str(refused.value).split())
    assert said in text
    assert "don't meet the specifications of the schema" not in text
    assert template(right, apis=(*MONITORING, *GATEWAYS))


ELSEWHERE = {
    "%s this cluster has no": "test_what_a_cluster_lacks",
    "model.existingClaim: %s is [%s]": "test_lifecycle.py, since Helm asks the cluster for it",
}
"""Where a rule is shown that depends on the cluster."""


def test_every_rule_is_shown() -> None:
    """One that nobody breaks here may never hold: each message of the templates is one that is met above."""
    texts = [path.read_text() for path in sorted((CHART / "templates").rglob("*.*"))]
    messages = [
        re.sub(r"\\(.)", r"\1", message)
        for text in texts
        for message in re.findall(r'\bfail \(?(?:printf )?"((?:[^"\\]|\\.)*)"', text)
    ]
    assert len(messages) > 30
    said = []
    for wrong, _, _ in RULES.values():
        with pytest.raises(Refused) as refused:
            template(wrong, apis=APIS)
        said.append(" ".join(str(refused.value).split()))
    for message in messages:
        if message.startswith(tuple(ELSEWHERE)):
            continue
        pattern = re.sub(r"%[sdq]", ".*", re.escape(message).replace("\\%", "%"))
        assert [one for one in said if re.search(pattern, one)], message


@pytest.mark.parametrize(
    ("values", "missing"),
    [
        (ROUTE, "Gateway API"),
        (POOL, "Inference Extension"),
        (of_profile("pp2-tp8"), "this cluster has no LeaderWorkerSet"),
    ],
)
def test_what_a_cluster_lacks(values: dict[str, Any], missing: str) -> None:
    """A route that was asked for and is left out would look like a deployment that does not answer."""
    with pytest.raises(Refused, match=missing):
        template(merged(EP8, values), apis=())


def test_monitoring_is_left_out_where_it_is_unknown() -> None:
    """It is on by default, and most clusters to try something on have no operator."""
    for kind, api in zip(("ServiceMonitor", "PrometheusRule"), (MONITORING[0], MONITORING[2]), strict=True):
        assert f"kind: {kind}" not in template(EP8, apis=())
        assert f"kind: {kind}" in template(EP8)
        # A cluster may have one of them only: the agent's mode has no rules.
        assert (f"kind: {kind}" in template(EP8, apis=[MONITORING[0]])) is (api == MONITORING[0])


@pytest.mark.parametrize("change", [{"replicas": 0}, {"monitoring": {"serviceMonitor": {"enabled": False}}}])
def test_no_alert_about_what_nobody_scrapes(change: dict[str, Any]) -> None:
    """It would fire for ever."""
    assert "kind: PrometheusRule" not in template(merged(EP8, change))
