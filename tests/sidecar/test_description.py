# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from kimi_k3.sidecar.app import create_app
from kimi_k3.sidecar.description import examples
from kimi_k3.sidecar.guard import PROBES
from kimi_k3.sidecar.settings import Settings

from .test_app import PATHS


@pytest.fixture
def document(tmp_path: Path) -> Any:
    """The API's description as a client gets it."""
    with TestClient(create_app(Settings(state_dir=tmp_path))) as client:
        client.get("/openapi.json")
        return client.get("/openapi.json").json()


def test_every_path_is_described(document: Any) -> None:
    """Each has a text for whoever is on call, its statuses, and an example."""
    changing = {
        "/warnings/{warning_id}/acknowledgement": {"post", "delete"},
        "/nodes/{node}": {"put"},
        "/nodes/{node}/ranks/{rank}": {"put"},
    }
    assert set(document["paths"]) == {*PATHS, "/events", *changing}
    for path, methods in document["paths"].items():
        assert set(methods) == changing.get(path, {"get"})
        assert all(len(method["description"]) > 25 for method in methods.values())
    for path in PATHS:
        later = {"503"} if path in ("/startupz", "/readyz") else set()
        guarded = set() if path in PROBES else {"401"}
        assert set(document["paths"][path]["get"]["responses"]) == {"200", "500"} | later | guarded
    assert {path for path, _ in examples()} == set(PATHS) - {"/metrics"}


def test_problems_are_described(document: Any) -> None:
    """Whatever is refused is refused in the one form of RFC 9457."""
    for methods in document["paths"].values():
        for method in methods.values():
            for status, answer in method["responses"].items():
                if status not in ("200", "204", "503"):
                    schema = answer["content"]["application/problem+json"]["schema"]
                    assert schema == {"$ref": "#/components/schemas/Problem"}
    assert "HTTPValidationError" not in document["components"]["schemas"]


def test_examples_are_valid(document: Any) -> None:
    """An example that its own schema refuses misleads; nulls must not get lost on the way."""
    for (path, status), example in examples().items():
        content = document["paths"][path]["get"]["responses"][str(status)]["content"]
        assert type(example).model_validate(content["application/json"]["example"]) == example


def test_unknown_keys_are_refused(document: Any) -> None:
    """Clients may rely on the schema: no answer carries keys that are not in it."""
    schemas = document["components"]["schemas"]
    objects = {name: one for name, one in schemas.items() if one.get("type") == "object"}
    assert [name for name, one in objects.items() if one.get("additionalProperties") is not False] == []
