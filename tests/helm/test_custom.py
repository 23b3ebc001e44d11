# SPDX-License-Identifier: Apache-2.0
"""The check of custom resources itself: their definitions are not kept here, so it is run by hand."""

from __future__ import annotations

from typing import Any

from tests.helm.cases import CASES, GATEWAYS
from tests.helm.custom import errors, schemas
from tests.helm.rendering import MONITORING, rendered


def definition(**properties: Any) -> dict[str, Any]:
    """Of HTTPRoute, with no more than these fields in its specification."""
    objects = {
        "apiVersion": {"type": "string"},
        "kind": {"type": "string"},
        "spec": {"type": "object", "properties": properties},
    }
    schema = {"openAPIV3Schema": {"type": "object", "properties": objects}}
    version = {"name": "v1", "served": True, "schema": schema}
    group = {"group": "gateway.networking.k8s.io", "names": {"kind": "HTTPRoute"}}
    return {"spec": {**group, "versions": [version]}}


def test_it_finds_what_is_wrong() -> None:
    """A field that the definition does not know, and a type; nothing in what is as it says."""
    found = rendered(CASES["route"], apis=(*MONITORING, *GATEWAYS))
    names: dict[str, Any] = {"parentRefs": {"type": "array"}, "rules": {"type": "array"}}
    assert list(errors(schemas([definition(**names)]), found)) == []
    (unknown,) = errors(schemas([definition(rules=names["rules"])]), found)
    assert "'parentRefs' was unexpected" in unknown
    (wrong,) = errors(schemas([definition(**{**names, "rules": {"type": "string"}})]), found)
    assert wrong.startswith("HTTPRoute $.spec.rules: ")
