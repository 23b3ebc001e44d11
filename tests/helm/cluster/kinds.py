# SPDX-License-Identifier: Apache-2.0
"""The kinds that the cluster knows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Kind:
    """One kind of object, as discovery tells it."""

    group: str
    version: str
    plural: str
    kind: str
    namespaced: bool = True
    in_all: bool = False
    """Whether `kubectl get all` shows it."""
    short: str = ""

    @property
    def api_version(self) -> str:
        """As objects carry it."""
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def base(self) -> str:
        """Path of its group and version."""
        return f"/apis/{self.api_version}" if self.group else f"/api/{self.version}"


BUILT_IN = (
    Kind("", "v1", "namespaces", "Namespace", namespaced=False),
    Kind("", "v1", "secrets", "Secret"),
    Kind("", "v1", "configmaps", "ConfigMap"),
    Kind("", "v1", "services", "Service", in_all=True),
    Kind("", "v1", "serviceaccounts", "ServiceAccount"),
    Kind("", "v1", "persistentvolumeclaims", "PersistentVolumeClaim", short="pvc"),
    Kind("", "v1", "pods", "Pod", in_all=True),
    Kind("", "v1", "events", "Event"),
    Kind("apps", "v1", "deployments", "Deployment", in_all=True, short="deploy"),
    Kind("apps", "v1", "replicasets", "ReplicaSet", in_all=True),
    Kind("batch", "v1", "jobs", "Job", in_all=True),
    Kind("policy", "v1", "poddisruptionbudgets", "PodDisruptionBudget"),
    Kind("networking.k8s.io", "v1", "networkpolicies", "NetworkPolicy"),
    Kind("discovery.k8s.io", "v1", "endpointslices", "EndpointSlice"),
)

MONITORING = (
    Kind("monitoring.coreos.com", "v1", "servicemonitors", "ServiceMonitor"),
    Kind("monitoring.coreos.com", "v1", "prometheusrules", "PrometheusRule"),
)
"""Of Prometheus' operator, where it is installed."""


def versions(kinds: Iterable[Kind]) -> dict[str, list[Kind]]:
    """The kinds by their group and version."""
    found: dict[str, list[Kind]] = {}
    for kind in kinds:
        found.setdefault(kind.api_version, []).append(kind)
    return found
