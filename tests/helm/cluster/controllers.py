# SPDX-License-Identifier: Apache-2.0
"""What turns objects into running pods, in the little that decides whether a rollout ends.

A node has GPUs, labels and taints; a pod gets all GPUs that it asks for or none, where its affinity and its
tolerations allow. A volume of one node is attached where its first pod runs. ``Recreate`` ends the old pod
first, ``RollingUpdate`` waits for the new one. A scheduled pod is ready at once.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.helm.cluster.kinds import BUILT_IN, Kind
from tests.helm.cluster.store import Object, Store

POD, REPLICA_SET = (next(one for one in BUILT_IN if one.kind == kind) for kind in ("Pod", "ReplicaSet"))
HASH = "pod-template-hash"
GPU = "amd.com/gpu"


@dataclass(frozen=True)
class Node:
    """A machine."""

    name: str
    gpus: int = 8
    labels: dict[str, str] = field(default_factory=dict)
    taints: tuple[str, ...] = ()


class Controllers:
    """One thread that looks after every change."""

    def __init__(self, store: Store, nodes: Sequence[Node], runs: Callable[[Object], bool]) -> None:
        self._store, self._nodes, self._runs = store, nodes, runs
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="controllers", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End."""
        self._stop.set()
        with self._store.changed:
            self._store.changed.notify_all()
        self._thread.join()

    def _loop(self) -> None:
        seen = ""
        while not self._stop.is_set():
            with self._store.changed:
                if self._store.version() == seen:
                    self._store.changed.wait(1.0)
                seen = self._store.version()
                for claim in self._store.list("persistentvolumeclaims"):
                    self._store.set_status("persistentvolumeclaims", claim, {"phase": "Bound"})
                for deployment in self._store.list("deployments"):
                    self._deployment(deployment)
                for pod in self._store.list("pods"):
                    self._pod(pod)
                for job in self._store.list("jobs"):
                    self._job(job)

    def _job(self, job: Object) -> None:
        """One pod; when that has been scheduled, the Job is done."""
        pods = self._owned("pods", job)
        if not pods and not job.get("status"):
            self._create(POD, job, "job")
        if any(pod.get("status", {}).get("phase") == "Running" for pod in pods):
            for pod in pods:
                self._store.set_status("pods", pod, {**pod["status"], "phase": "Succeeded"})
            self._store.set_status("jobs", job, _finished(self._store.now(), job))

    def _deployment(self, found: Object) -> None:
        spec = found["spec"]
        wanted = spec.get("replicas", 1)
        digest = hashlib.sha256(json.dumps(spec["template"], sort_keys=True).encode()).hexdigest()[:10]
        sets = self._owned("replicasets", found)
        pods = [pod for one in sets for pod in self._owned("pods", one)]
        new = [pod for pod in pods if pod["metadata"]["labels"][HASH] == digest]
        old = [pod for pod in pods if pod not in new]
        present = next((one for one in sets if one["metadata"]["labels"][HASH] == digest), None)
        ready = [pod for pod in new if _ready(pod)]
        recreate = spec.get("strategy", {}).get("type") == "Recreate"
        for pod in new[wanted:] + (old if recreate or len(ready) >= wanted else []):
            self._store.delete("pods", pod["metadata"]["namespace"], pod["metadata"]["name"])
        if present is None:
            present = self._create(REPLICA_SET, found, digest)
        if not (recreate and old):
            for _ in range(len(new), wanted):
                self._create(POD, present, digest)
        replicas = {"replicas": len(new), "readyReplicas": len(ready), "availableReplicas": len(ready)}
        replicas["observedGeneration"] = present["metadata"]["generation"]
        self._store.set_status("replicasets", present, replicas)
        done = len(ready) >= wanted and not old
        conditions = [
            {"type": "Available", "status": "True" if ready or not wanted else "False"},
            {
                "type": "Progressing",
                "status": "True",
                "reason": "NewReplicaSetAvailable" if done else "ReplicaSetUpdated",
            },
        ]
        status = {
            "observedGeneration": found["metadata"]["generation"],
            "replicas": len(new) + len(old),
            "updatedReplicas": len(new),
            "readyReplicas": len(ready),
            "availableReplicas": len(ready),
            "conditions": conditions,
        }
        self._store.set_status("deployments", found, status)

    def _owned(self, plural: str, owner: Object) -> list[Object]:
        uid = owner["metadata"]["uid"]
        return [one for one in self._store.list(plural) if _owner(one) == uid]

    def _create(self, kind: Kind, owner: Object, digest: str) -> Object:
        """A ReplicaSet of a Deployment, or a pod of a ReplicaSet: both hold the template."""
        template, metadata = owner["spec"]["template"], owner["metadata"]
        reference = {"apiVersion": owner["apiVersion"], "kind": owner["kind"]}
        reference |= {"name": metadata["name"], "uid": metadata["uid"], "controller": True}
        labels = {**template["metadata"].get("labels", {}), HASH: digest}
        made: Object = {"metadata": {"labels": labels, "ownerReferences": [reference]}}
        if kind is POD:
            made["metadata"]["generateName"] = f"{metadata['name']}-"
            made["metadata"]["annotations"] = template["metadata"].get("annotations", {})
            made |= {"spec": template["spec"], "status": {"phase": "Pending"}}
        else:
            made["metadata"]["name"] = f"{metadata['name']}-{digest}"
            held = {**template, "metadata": {**template["metadata"], "labels": labels}}
            made["spec"] = {
                "replicas": owner["spec"].get("replicas", 1),
                "selector": owner["spec"]["selector"],
                "template": held,
            }
        return self._store.create(kind, metadata["namespace"], made)

    def _pod(self, pod: Object) -> None:
        if pod.get("status", {}).get("phase") not in (None, "Pending"):
            return
        node = next((node for node in self._nodes if self._fits(pod, node)), None)
        if node is None:
            why = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
            self._store.set_status("pods", pod, {"phase": "Pending", "conditions": [why]})
            return
        if pod["spec"].get("restartPolicy") == "Never":
            ended = self._runs(pod)
            phase = "Succeeded" if ended else "Failed"
            self._store.set_status("pods", pod, {"phase": phase, "nodeName": node.name})
            return
        conditions = [
            {"type": kind, "status": "True"} for kind in ("PodScheduled", "Ready", "ContainersReady")
        ]
        self._store.set_status(
            "pods", pod, {"phase": "Running", "nodeName": node.name, "conditions": conditions}
        )

    def _fits(self, pod: Object, node: Node) -> bool:
        others = [
            one
            for one in self._store.list("pods")
            if one.get("status", {}).get("phase") == "Running"
            and one["metadata"]["uid"] != pod["metadata"]["uid"]
        ]
        here = [one for one in others if one["status"]["nodeName"] == node.name]
        if gpus(pod) + sum(map(gpus, here)) > node.gpus:
            return False
        borne = {one.get("key") for one in pod["spec"].get("tolerations", [])}
        if not set(node.taints) <= borne or not _likes(pod, node) or not _near(pod, here):
            return False
        elsewhere = {claim for one in others if one not in here for claim in self._attached(one)}
        return not elsewhere & self._attached(pod)

    def _attached(self, pod: Object) -> set[str]:
        """Claims that only one node can have at a time."""
        found = set()
        for volume in pod["spec"].get("volumes", []):
            name = volume.get("persistentVolumeClaim", {}).get("claimName")
            claim = name and self._store.find("persistentvolumeclaims", pod["metadata"]["namespace"], name)
            if claim and "ReadWriteMany" not in claim["spec"]["accessModes"]:
                found.add(name)
        return found


def gpus(pod: Object) -> int:
    """GPUs that a pod holds: what its containers ask for at most, one after another."""
    asked = [
        int(one.get("resources", {}).get("limits", {}).get(GPU, 0))
        for one in (*pod["spec"].get("initContainers", []), *pod["spec"]["containers"])
    ]
    return max(asked, default=0)


def _likes(pod: Object, node: Node) -> bool:
    affinity = pod["spec"].get("affinity", {}).get("nodeAffinity", {})
    terms = affinity.get("requiredDuringSchedulingIgnoredDuringExecution", {}).get("nodeSelectorTerms")
    if terms and not any(
        all(node.labels.get(one["key"]) in one["values"] for one in term["matchExpressions"])
        for term in terms
    ):
        return False
    return all(node.labels.get(key) == value for key, value in pod["spec"].get("nodeSelector", {}).items())


def _near(pod: Object, here: Sequence[Object]) -> bool:
    """Whether the pods that it wants to be beside are on the node."""
    affinity = pod["spec"].get("affinity", {}).get("podAffinity", {})
    terms = affinity.get("requiredDuringSchedulingIgnoredDuringExecution", [])
    return all(
        any(term["labelSelector"]["matchLabels"].items() <= one["metadata"]["labels"].items() for one in here)
        for term in terms
    )


def _owner(pod: Object) -> str:
    owners = pod["metadata"].get("ownerReferences", [])
    return owners[0]["uid"] if owners else ""


def _ready(pod: Object) -> bool:
    conditions = pod.get("status", {}).get("conditions", [])
    return any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)


def _finished(now: str, job: Object) -> dict[str, Any]:
    if "status" in job:
        return dict(job["status"])
    complete = {"type": "Complete", "status": "True"}
    return {"succeeded": 1, "startTime": now, "completionTime": now, "conditions": [complete]}
