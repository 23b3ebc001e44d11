# SPDX-License-Identifier: Apache-2.0
"""The HTTP side: discovery, reading with selectors, writing as clients do it, watching."""

from __future__ import annotations

import json
import queue
import re
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

import anyio
import kubernetes_validate
import yaml
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from tests.helm.cluster import protobuf
from tests.helm.cluster.kinds import Kind, versions
from tests.helm.cluster.store import Object, Refused, Store

VERBS = ["create", "delete", "get", "list", "patch", "update", "watch"]
WATCH_SECONDS = 0.05
NOT_FIELDS = ("status",)


class Api:
    """The routes over a store.

    Args:
        minor: Kubernetes' minor version, whose schemas every object must follow.
        logs: what a pod has printed.
    """

    def __init__(
        self, store: Store, kinds: Iterable[Kind], minor: str, logs: Callable[[Object], str]
    ) -> None:
        self.store, self.minor, self.logs = store, minor, logs
        self.kinds = tuple(kinds)
        self.by_path = {(kind.base, kind.plural): kind for kind in self.kinds}
        self.requests: list[str] = []

    def app(self) -> Starlette:
        """The application."""
        routes = [
            Route("/version", self.version),
            Route("/api", self.core),
            Route("/apis", self.groups),
            Route("/openapi/v3", self.openapi),
            Route("/openapi/v3/{rest:path}", self.openapi_of),
            Route("/{path:path}", self.objects, methods=["GET", "POST", "PUT", "PATCH", "DELETE"]),
        ]
        return Starlette(routes=routes, exception_handlers={Refused: _refused})

    # Discovery.

    async def version(self, _: Request) -> Response:
        major, minor = self.minor.split(".")
        return JSONResponse({"major": major, "minor": minor, "gitVersion": f"v{self.minor}.0"})

    async def core(self, _: Request) -> Response:
        return JSONResponse({"kind": "APIVersions", "versions": ["v1"]})

    async def groups(self, _: Request) -> Response:
        groups = []
        for group in dict.fromkeys(kind.group for kind in self.kinds if kind.group):
            found = dict.fromkeys(kind.version for kind in self.kinds if kind.group == group)
            told = [{"groupVersion": f"{group}/{version}", "version": version} for version in found]
            groups.append({"name": group, "versions": told, "preferredVersion": told[0]})
        return JSONResponse({"kind": "APIGroupList", "apiVersion": "v1", "groups": groups})

    async def openapi(self, _: Request) -> Response:
        paths = {
            kinds[0].base.lstrip("/"): {"serverRelativeURL": f"/openapi/v3{kinds[0].base}"}
            for kinds in versions(self.kinds).values()
        }
        return JSONResponse({"paths": paths})

    async def openapi_of(self, request: Request) -> Response:
        """Only so much that clients leave the checking to the server."""
        base = "/" + request.path_params["rest"]
        field = {"name": "fieldValidation", "in": "query", "schema": {"type": "string"}}
        paths = {}
        for kind in self.kinds:
            if kind.base == base:
                told = {"group": kind.group, "version": kind.version, "kind": kind.kind}
                patch = {"parameters": [field], "x-kubernetes-group-version-kind": told}
                paths[f"{base}/{kind.plural}/{{name}}"] = {"patch": patch}
        return JSONResponse(
            {"openapi": "3.0.0", "info": {"title": "cluster", "version": "1"}, "paths": paths}
        )

    # Objects.

    async def objects(self, request: Request) -> Response:
        """Whatever lies below a group's version."""
        self.requests.append(f"{request.method} {request.url.path}")
        parts = request.url.path.strip("/").split("/")
        size = 2 if parts[0] == "api" else 3
        base, rest = "/" + "/".join(parts[:size]), parts[size:]
        if not rest:
            return self._resources(base)
        namespace = ""
        if rest[0] == "namespaces" and len(rest) > 2:
            namespace, rest = rest[1], rest[2:]
        kind = self.by_path.get((base, rest[0]))
        if kind is None:
            raise Refused(404, "NotFound", f"the server could not find {request.url.path}")
        if not kind.namespaced:
            namespace = ""
        if rest[2:] == ["log"]:
            return PlainTextResponse(self.logs(self._get(kind, namespace, rest[1])))
        if len(rest) > 2:
            raise Refused(404, "NotFound", f"no {rest[2]} of {kind.plural}")
        name = rest[1] if len(rest) == 2 else None
        if request.method == "GET" and name is None:
            if request.query_params.get("watch") in ("1", "true"):
                return self._watch(request, kind, namespace)
            return self._list(request, kind, namespace)
        if request.method == "GET":
            return JSONResponse(self._get(kind, namespace, str(name)))
        if request.method == "DELETE":
            return JSONResponse(await run_in_threadpool(self.store.delete, kind.plural, namespace, str(name)))
        body = await request.body()
        return await run_in_threadpool(self._write, request, kind, namespace, name, body)

    def _resources(self, base: str) -> Response:
        found = [kind for kind in self.kinds if kind.base == base]
        if not found:
            raise Refused(404, "NotFound", f"the server could not find {base}")
        told = [
            {
                "name": kind.plural,
                "singularName": kind.kind.lower(),
                "kind": kind.kind,
                "namespaced": kind.namespaced,
                "shortNames": [kind.short] if kind.short else [],
                "categories": ["all"] if kind.in_all else [],
                "verbs": VERBS,
            }
            for kind in found
        ]
        return JSONResponse(
            {
                "kind": "APIResourceList",
                "apiVersion": "v1",
                "groupVersion": found[0].api_version,
                "resources": told,
            }
        )

    def _get(self, kind: Kind, namespace: str, name: str) -> Object:
        found = self.store.find(kind.plural, namespace, name)
        if found is None:
            raise Refused(404, "NotFound", f'{kind.plural} "{name}" not found')
        return found

    def _list(self, request: Request, kind: Kind, namespace: str) -> Response:
        with self.store.lock:
            found = self.store.list(kind.plural, namespace, _chosen(request))
            version = self.store.version()
        return JSONResponse(
            {
                "kind": f"{kind.kind}List",
                "apiVersion": kind.api_version,
                "metadata": {"resourceVersion": version},
                "items": found,
            }
        )

    def _watch(self, request: Request, kind: Kind, namespace: str) -> Response:
        chosen = _chosen(request)
        after = int(request.query_params.get("resourceVersion") or 0)
        with self.store.lock:
            waiting = self.store.watch(kind.plural)
            # What came between the list and this, or everything that there is.
            first = [
                ("ADDED", one)
                for one in self.store.list(kind.plural, namespace, chosen)
                if int(one["metadata"]["resourceVersion"]) > after
            ]
            bookmark: Object = {"kind": kind.kind, "apiVersion": kind.api_version}
            notes = {"k8s.io/initial-events-end": "true"}
            bookmark |= {"metadata": {"resourceVersion": self.store.version(), "annotations": notes}}

        async def told() -> AsyncIterator[bytes]:
            try:
                for event, one in first:
                    yield _line(event, one)
                if request.query_params.get("sendInitialEvents") == "true":
                    yield _line("BOOKMARK", bookmark)
                while not await request.is_disconnected():
                    try:
                        event, one = waiting.get_nowait()
                    except queue.Empty:
                        await anyio.sleep(WATCH_SECONDS)
                        continue
                    if namespace in ("", one["metadata"].get("namespace", "")) and chosen(one):
                        yield _line(event, one)
            finally:
                self.store.forget(waiting)

        return StreamingResponse(told(), media_type="application/json")

    def _write(self, request: Request, kind: Kind, namespace: str, name: str | None, body: bytes) -> Response:
        form = request.headers.get("content-type", "").split(";")[0]
        given = protobuf.decoded(body) if form == protobuf.CONTENT_TYPE else yaml.safe_load(body)
        dry = "All" in request.query_params.getlist("dryRun")
        with self.store.lock:
            known = None if name is None else self.store.find(kind.plural, namespace, name)
            if request.method == "PATCH" and form != "application/apply-patch+yaml":
                if known is None:
                    raise Refused(404, "NotFound", f'{kind.plural} "{name}" not found')
                given = merged(known, given)
            self._check(kind, given)
            if kind.kind == "Service":
                address = f"10.0.0.{len(self.store.list('services')) + 1}"
                given["spec"].setdefault("clusterIP", (known or given)["spec"].get("clusterIP", address))
            if dry:
                return JSONResponse(given)
            if known is None and request.method in ("POST", "PATCH"):
                return JSONResponse(self.store.create(kind, namespace, given), status_code=201)
            return JSONResponse(self.store.replace(kind, namespace, str(name), given))

    def _check(self, kind: Kind, given: Object) -> None:
        if (why := wrong(kind, given)) is not None:
            raise Refused(422, "Invalid", f"{kind.kind}: {why}")
        fields = {key: value for key, value in given.items() if key not in NOT_FIELDS}
        fields |= {"apiVersion": kind.api_version, "kind": kind.kind}
        try:
            kubernetes_validate.validate(fields, self.minor, strict=True)
        except kubernetes_validate.SchemaNotFoundError:
            return
        except kubernetes_validate.ValidationError as error:
            where = ".".join(map(str, error.path))
            raise Refused(422, "Invalid", f"{kind.kind}: {where}: {error.message}") from None


def wrong(kind: Kind, given: Object) -> str | None:
    """What a real API server refuses beyond its schemas, as far as a chart may get it wrong."""
    if kind.kind == "Service":
        name = given["metadata"].get("name", "")
        if not re.fullmatch("[a-z]([-a-z0-9]{0,61}[a-z0-9])?", name):
            return f"metadata.name: {name}: a DNS-1035 label must begin with a letter"
        ports = [port["port"] for port in given["spec"]["ports"]]
        if len(ports) != len(set(ports)):
            return "spec.ports: Duplicate value"
    spec = given.get("spec", {}).get("template", {}).get("spec", given.get("spec", {}))
    for container in (*spec.get("initContainers", []), *spec.get("containers", [])):
        for name, asked in container.get("resources", {}).get("requests", {}).items():
            limit = container["resources"].get("limits", {}).get(name)
            if limit is not None and amount(asked) > amount(limit):
                return f"{container['name']}: resources.requests: {name}: must not be above its limit"
        names = [mount["name"] for mount in container.get("volumeMounts", [])]
        if missing := set(names) - {volume["name"] for volume in spec.get("volumes", [])}:
            return f"{container['name']}: volumeMounts: Not found: {', '.join(sorted(missing))}"
    return None


def amount(quantity: Any) -> float:
    """A quantity as a number."""
    units = {
        "m": 1e-3,
        "Ki": 2**10,
        "Mi": 2**20,
        "Gi": 2**30,
        "Ti": 2**40,
        "": 1,
        "k": 1e3,
        "M": 1e6,
        "G": 1e9,
    }
    number, unit = re.fullmatch("([0-9.]+)([A-Za-z]*)", str(quantity)).groups()  # type: ignore[union-attr]
    return float(number) * units[unit]


def merged(known: Any, change: Any) -> Any:
    """A merge patch (RFC 7386); lists of named things are merged by name, as a strategic one does."""
    if isinstance(change, dict) and isinstance(known, dict):
        made = dict(known)
        for key, value in change.items():
            if key.startswith("$"):
                continue
            if value is None:
                made.pop(key, None)
            else:
                made[key] = merged(known.get(key), value)
        return made
    if _named(change) and _named(known):
        left = {one["name"]: one for one in known}
        gone = [one["name"] for one in change if one.get("$patch") == "delete"]
        left |= {one["name"]: merged(left.get(one["name"], {}), one) for one in change}
        return [one for name, one in left.items() if name not in gone]
    return change


def _named(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, dict) and "name" in one for one in value)


def _chosen(request: Request) -> Callable[[Object], bool]:
    """By ``labelSelector`` and ``fieldSelector``, as far as clients of this chart use them."""
    labels = _wanted(request.query_params.get("labelSelector", ""))
    fields = _wanted(request.query_params.get("fieldSelector", ""))

    def chosen(one: Object) -> bool:
        carried = one["metadata"].get("labels", {})
        if any((carried.get(key) == value) is not equal for key, value, equal in labels):
            return False
        return not any((str(_field(one, key)) == value) is not equal for key, value, equal in fields)

    return chosen


def _wanted(selector: str) -> list[tuple[str, str, bool]]:
    found = []
    for part in filter(None, selector.split(",")):
        assert " in " not in part, f"not a selector that is known here: {selector}"
        key, _, value = part.partition("=")
        found.append((key.rstrip("!"), value.lstrip("="), not key.endswith("!")))
    return found


def _field(one: Object, path: str) -> Any:
    found: Any = one
    for part in path.split("."):
        found = found.get(part, "") if isinstance(found, dict) else ""
    return found


def _line(event: str, one: Object) -> bytes:
    return json.dumps({"type": event, "object": one}).encode() + b"\n"


async def _refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, Refused)
    told: Object = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure"}
    told |= {"message": str(error), "reason": error.reason, "code": error.code}
    return JSONResponse(told, status_code=error.code)
