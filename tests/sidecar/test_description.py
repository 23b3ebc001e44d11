# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from kimi_k3.sidecar.app import create_app
from kimi_k3.sidecar.description import examples
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
    assert set(document["paths"]) == set(PATHS)
    for path, methods in document["paths"].items():
        assert set(methods) == {"get"}
        assert len(methods["get"]["description"]) > 40
        wanted = {"200", "500"} | ({"503"} if path in ("/startupz", "/readyz") else set())
        assert set(methods["get"]["responses"]) == wanted
    assert {path for path, _ in examples()} == set(PATHS) - {"/metrics"}


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
