# SPDX-License-Identifier: Apache-2.0
"""The objects, their versions, and who watches them."""

from __future__ import annotations

import copy
import queue
import threading
import uuid
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from tests.helm.cluster.kinds import Kind

Object = dict[str, Any]
Place = tuple[str, str, str]
"""Plural name of the kind, namespace, name."""

IMMUTABLE = {
    "Job": ("template", "selector"),
    "Deployment": ("selector",),
    "PersistentVolumeClaim": ("accessModes", "storageClassName", "volumeName"),
}
"""Fields of a specification that an API server does not let anybody change, of what the chart makes."""

KEPT = ("uid", "creationTimestamp", "generation", "resourceVersion")
"""What of an object's metadata is the server's."""


class Refused(Exception):
    """An answer other than 2xx."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.code, self.reason = code, reason


class Store:
    """All objects; every change has a number and is told to those that watch the kind."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self._objects: dict[Place, Object] = {}
        self._version = 100
        self._watchers: list[tuple[str, queue.SimpleQueue[tuple[str, Object]]]] = []

    def now(self) -> str:
        """The present moment, as objects carry it."""
        return datetime.now(tz=UTC).strftime("%Y-%m-%dT%H:%M:%SZ")

    def version(self) -> str:
        """Number of the last change."""
        return str(self._version)

    def find(self, plural: str, namespace: str, name: str) -> Object | None:
        """A copy of the object, or ``None``."""
        with self.lock:
            found = self._objects.get((plural, namespace, name))
            return None if found is None else copy.deepcopy(found)

    def list(
        self, plural: str, namespace: str = "", chosen: Callable[[Object], bool] | None = None
    ) -> list[Object]:
        """Copies, in the order of their names; of all namespaces without one."""
        with self.lock:
            found = [
                copy.deepcopy(one)
                for place, one in sorted(self._objects.items())
                if place[0] == plural and namespace in ("", place[1])
            ]
        return [one for one in found if chosen is None or chosen(one)]

    def create(self, kind: Kind, namespace: str, given: Object) -> Object:
        """Put a new object."""
        with self.lock:
            name = given["metadata"].get("name")
            if not name:
                name = given["metadata"]["generateName"] + uuid.uuid4().hex[:5]
            if (kind.plural, namespace, name) in self._objects:
                raise Refused(409, "AlreadyExists", f'{kind.plural} "{name}" already exists')
            made = copy.deepcopy(given)
            made |= {"apiVersion": kind.api_version, "kind": kind.kind}
            made["metadata"] |= {"name": name, "uid": str(uuid.uuid4()), "generation": 1}
            made["metadata"]["creationTimestamp"] = self.now()
            if kind.namespaced:
                made["metadata"]["namespace"] = namespace
            return self._put((kind.plural, namespace, name), made, "ADDED")

    def replace(self, kind: Kind, namespace: str, name: str, given: Object) -> Object:
        """Put a new version; its status is the controllers' and stays."""
        with self.lock:
            place = (kind.plural, namespace, name)
            known = self._objects.get(place)
            if known is None:
                raise Refused(404, "NotFound", f'{kind.plural} "{name}" not found')
            version = given["metadata"].get("resourceVersion")
            if version and version != known["metadata"]["resourceVersion"]:
                raise Refused(409, "Conflict", f'{kind.plural} "{name}": the object has been modified')
            for field in IMMUTABLE.get(kind.kind, ()):
                if given["spec"].get(field) != known["spec"].get(field):
                    raise Refused(422, "Invalid", f'{kind.kind} "{name}": spec.{field}: field is immutable')
            made = copy.deepcopy(given)
            made["metadata"] |= {key: known["metadata"][key] for key in KEPT}
            made["metadata"].setdefault("namespace", namespace)
            if "status" in known:
                made["status"] = known["status"]
            if made.get("spec") != known.get("spec"):
                made["metadata"]["generation"] = known["metadata"]["generation"] + 1
            return self._put(place, made, "MODIFIED")

    def set_status(self, plural: str, found: Object, status: Mapping[str, Any]) -> None:
        """What a controller says; nothing happens when the object is gone or says so already."""
        with self.lock:
            place = (plural, found["metadata"].get("namespace", ""), found["metadata"]["name"])
            known = self._objects.get(place)
            if known is None or known["metadata"]["uid"] != found["metadata"]["uid"]:
                return
            if known.get("status") != status:
                self._put(place, {**known, "status": dict(status)}, "MODIFIED")

    def delete(self, plural: str, namespace: str, name: str) -> Object:
        """Take an object away, and whatever it owns."""
        with self.lock:
            found = self._objects.pop((plural, namespace, name), None)
            if found is None:
                raise Refused(404, "NotFound", f'{plural} "{name}" not found')
            self._tell("DELETED", plural, found)
            uid = found["metadata"]["uid"]
            for place, one in list(self._objects.items()):
                if uid in [owner["uid"] for owner in one["metadata"].get("ownerReferences", [])]:
                    self.delete(*place)
            return found

    def watch(self, plural: str) -> queue.SimpleQueue[tuple[str, Object]]:
        """What changes from now on."""
        with self.lock:
            waiting: queue.SimpleQueue[tuple[str, Object]] = queue.SimpleQueue()
            self._watchers.append((plural, waiting))
            return waiting

    def forget(self, waiting: queue.SimpleQueue[tuple[str, Object]]) -> None:
        """Somebody no longer watches."""
        with self.lock:
            self._watchers = [one for one in self._watchers if one[1] is not waiting]

    def _put(self, place: Place, made: Object, event: str) -> Object:
        self._objects[place] = made
        self._tell(event, place[0], made)
        return copy.deepcopy(made)

    def _tell(self, event: str, plural: str, found: Object) -> None:
        self._version += 1
        found["metadata"]["resourceVersion"] = str(self._version)
        for watched, waiting in self._watchers:
            if watched == plural:
                waiting.put((event, copy.deepcopy(found)))
        self.changed.notify_all()
