# SPDX-License-Identifier: Apache-2.0
"""Values that operators give, by name: what is rendered, validated and kept as golden files."""

from __future__ import annotations

import json
from typing import Any

import yaml

from tests.helm.rendering import CHART, GROUPS

FACTS: dict[str, Any] = json.loads((CHART / "files" / "profiles.json").read_text())
ON_DISK: dict[str, Any] = {"model": {"hostPath": "/mnt/models", "path": "Kimi-K3"}}
CONSENT: dict[str, Any] = {"weights": {"acceptLossy": True}}
TOKEN: dict[str, Any] = {"auth": {"sidecarTokenSecret": {"name": "operators"}}}
CPU: dict[str, Any] = yaml.safe_load((CHART / "values-cpu.yaml").read_text())

EVERYTHING: dict[str, Any] = {
    **CONSENT,
    "profile": "ep8",
    "overrides": {"max-model-len": 65536, "gpu-memory-utilization": 0.93, "enforce-eager": True},
    "model": {
        "servedName": "moonshotai/Kimi-K3",
        "download": {
            "enabled": True,
            "revision": "f831ab66" + 32 * "0",
            "endpoint": "https://hub.example.com",
            "tokenSecret": {"name": "hub", "key": "token"},
            "storageClassName": "fast",
        },
    },
    "image": {
        "registry": "registry.example.com/ai",
        "engine": {"digest": "sha256:" + 64 * "a"},
        "sidecar": {"tag": "1.2.3"},
        "pullPolicy": "IfNotPresent",
        "pullSecrets": ["registry"],
    },
    "engine": {"env": {"NCCL_DEBUG": "INFO"}},
    "startup": {"timeoutSeconds": 5400},
    "shutdown": {"drainSeconds": 0, "readinessDelaySeconds": 0},
    "storage": {"state": {"persistent": True}, "cache": {"persistent": True, "storageClassName": ""}},
    "auth": {
        "apiKeySecret": {"name": "clients", "key": "key"},
        "sidecarTokenSecret": {"name": "operators", "key": "token"},
    },
    "gateway": {
        "httpRoute": {
            "enabled": True,
            "parentRefs": [{"name": "gateway", "namespace": "gateways"}],
            "hostnames": ["k3.example.com"],
        },
        "inferencePool": {"enabled": True, "endpointPicker": {"name": "picker"}},
    },
    "monitoring": {
        "serviceMonitor": {"additionalLabels": {"release": "prometheus"}},
        "rules": {"additionalLabels": {"release": "prometheus"}},
    },
    "verify": {
        "enabled": True,
        "extent": "full",
        "results": {"existingClaim": "verifications", "path": "k3/ep8"},
    },
    "podDisruptionBudget": {"maxUnavailable": 0},
    "scheduling": {
        "gpuNodes": "product-name",
        "productNames": ["AMD_Instinct_MI325_OAM"],
        "requireUnpartitioned": True,
        "nodeSelector": {"pool": "gpu"},
        "priorityClassName": "serving",
        "topologySpreadConstraints": [
            {"maxSkew": 1, "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "DoNotSchedule"}
        ],
    },
    "security": {"gpuGroups": [993, 44], "seLinuxOptions": {"type": "container_use_devices_t"}},
}
GATEWAYS = (GROUPS, "gateway.networking.k8s.io/v1", "inference.networking.k8s.io/v1")


def of_profile(name: str) -> dict[str, Any]:
    """The least that starts a profile: where the checkpoint is, and consent where it is needed."""
    if name == "cpu-tiny":
        return CPU
    facts = FACTS["profiles"][name]
    token = TOKEN if facts["nodes"] > 1 else {}
    return {"profile": name, **ON_DISK, **(CONSENT if facts["weights"] == "int4" else {}), **token}


PROFILES = tuple(name for name, facts in FACTS["profiles"].items() if facts["notStartable"] is None)
CASES: dict[str, dict[str, Any]] = {
    **{name: of_profile(name) for name in PROFILES},
    "two-replicas": {**of_profile("ep8"), "replicas": 2},
    "exact-weights": {**ON_DISK, "weights": {"format": "mxfp4"}},
    "openshift": {
        **CONSENT,
        "model": {"existingClaim": "models", "path": "Kimi-K3"},
        "security": {"runAsUser": None, "fsGroup": None},
    },
    "route": {
        **of_profile("ep8"),
        "gateway": {"httpRoute": {"enabled": True, "parentRefs": [{"name": "gateway"}]}},
        "service": {"port": 80},
    },
    "tls": {**of_profile("ep8"), "tls": {"secretName": "certificate"}},
    "two-nodes": {
        **of_profile("dp-ep16"),
        "replicas": 2,
        "tls": {"secretName": "certificate"},
        "multiNode": {
            "networkInterface": "ens5",
            "rdmaResources": {"rdma/hca": 8},
            "podAnnotations": {"k8s.v1.cni.cncf.io/networks": "rdma"},
        },
    },
    "verified": {
        **of_profile("ep8"),
        "auth": {"apiKeySecret": {"name": "clients"}, **TOKEN["auth"]},
        "tls": {"secretName": "certificate"},
        "verify": {"enabled": True},
    },
    "kernel": {
        **of_profile("ep8"),
        "replicas": 0,
        "engine": {"env": {"HSA_NO_SCRATCH_RECLAIM": 1}},
        "security": {"gpuGroups": [993, 44]},
        "verify": {"enabled": True, "results": {"existingClaim": "verifications"}},
    },
    "everything": EVERYTHING,
}
