# SPDX-License-Identifier: Apache-2.0
"""Whatever stands in the journal's files, the sidecar answers."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from kimi_k3.journal.models import MemoryReading
from kimi_k3.journal.reader import read_journal
from kimi_k3.sidecar.app import create_app
from kimi_k3.sidecar.settings import Settings
from kimi_k3.words.weights import Projection

from .builders import NOW, conversion, lossy_rank, lossy_supervisor
from .test_app import PATHS

FILES = ("supervisor.json", "rank-0000.json", "rank-0001.json", "failure-7.json")
MEMORY = MemoryReading(kind="device", used_bytes=1, peak_bytes=2, total_bytes=3)
SUPERVISOR = lossy_supervisor(engine_url="http://127.0.0.1:1").model_dump(mode="json")
RANK = lossy_rank(
    0,
    conversions=(conversion(1, Projection.W13, memory_before=MEMORY), conversion(2, Projection.W2)),
    memory=MEMORY,
    loading={"bytes_done": 1, "bytes_total": 2, "shards_done": 1, "shards_total": 2},
).model_dump(mode="json")

ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([2**63 - 1, 2**63, -1, 0, 10**400, 1e308, 5e-324, 1.7e308]),
    st.sampled_from(
        ["0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59.999999-14:00", "1970-01-01T00:00:00Z"]
    ),
    st.sampled_from(
        ["", "http://[", "http://x:99999999", "\x00", "a\nb", '"}{', "mxfp4", "failed", "\U0010ffff"]
    ),
    st.text(max_size=5),
    st.lists(st.integers(), max_size=3),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value in a JSON document."""
    yield path
    entries = (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    )
    for key, inner in entries:
        yield from leaves(inner, (*path, key))


def changed(document: Any, path: tuple[Any, ...], value: Any) -> Any:
    """The document with another value at ``path``."""
    if not path:
        return value
    copy = dict(document) if isinstance(document, dict) else list(document)
    copy[path[0]] = changed(document[path[0]], path[1:], value)
    return copy


def mutations(document: Any) -> st.SearchStrategy[bytes]:
    """The document with up to three odd values in it."""

    def apply(changes: list[tuple[tuple[Any, ...], Any]]) -> bytes:
        result = document
        for path, value in changes:
            try:
                result = changed(result, path, value)
            except (KeyError, IndexError, TypeError):
                continue
        return json.dumps(result).encode()

    change = st.tuples(st.sampled_from(list(leaves(document))[1:]), ODD)
    return st.lists(change, max_size=3).map(apply)


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[TestClient, Path]]:
    """One application for all examples."""
    directory = tmp_path_factory.mktemp("state")
    given_settings = Settings(state_dir=directory, engine_timeout_seconds=0.2, refresh_seconds=0)
    app = create_app(given_settings, clock=lambda: NOW + timedelta(seconds=1))
    with TestClient(app, raise_server_exceptions=False) as asking:
        yield asking, directory


def ask_everything(asking: TestClient) -> None:
    """Every endpoint answers, and the scrape can be read."""
    for path in PATHS:
        answer = asking.get(path)
        assert answer.status_code in (200, 503), (path, answer.text)
        if path == "/metrics":
            families = list(text_string_to_metric_families(answer.text))
            series = [
                (sample.name, tuple(sorted(sample.labels.items())))
                for family in families
                for sample in family.samples
            ]
            assert len(series) == len(set(series)), "one series twice voids the scrape"


def replace_files(directory: Path, contents: dict[str, bytes]) -> None:
    """Only ``contents`` stands in the directory."""
    for old in directory.iterdir():
        old.unlink()
    for name, content in contents.items():
        (directory / name).write_bytes(content)


@given(contents=st.dictionaries(st.sampled_from(FILES), st.binary(max_size=60)))
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_bytes(client: tuple[TestClient, Path], contents: dict[str, bytes]) -> None:
    """Half a file, another program's file or noise is a fault to report and no reason to fall."""
    asking, directory = client
    replace_files(directory, contents)
    ask_everything(asking)
    assert {fault.file for fault in read_journal(directory).faults} == set(contents)


@given(supervisor=mutations(SUPERVISOR), rank=mutations(RANK))
@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_odd_records(client: tuple[TestClient, Path], supervisor: bytes, rank: bytes) -> None:
    """Records that are valid but extreme, or nearly valid: the largest numbers, the first and last year."""
    asking, directory = client
    replace_files(directory, {"supervisor.json": supervisor, "rank-0000.json": rank})
    ask_everything(asking)


def test_names_that_are_no_text(client: tuple[TestClient, Path]) -> None:
    """A file name that is not UTF-8 must not break the answer that reports it."""
    asking, directory = client
    replace_files(directory, {"supervisor.json": json.dumps(SUPERVISOR).encode()})
    Path(os.fsdecode(os.fsencode(directory) + b"/rank-\xff.json")).write_bytes(b"{}")
    ask_everything(asking)
    assert [fault["file"] for fault in asking.get("/status").json()["faults"]] == ["rank-\\xff.json"]
