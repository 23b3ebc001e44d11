# SPDX-License-Identifier: Apache-2.0
"""Secrets, ConfigMaps, Namespaces as Kubernetes' typed clients send them: protobuf, as far as they fill it.

Numbers of the fields: generated.proto in k8s.io/api/core/v1 and k8s.io/apimachinery/pkg/apis/meta/v1.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

MAGIC = b"k8s\x00"
CONTENT_TYPE = "application/vnd.kubernetes.protobuf"


def decoded(body: bytes) -> dict[str, Any]:
    """The object in an envelope (``runtime.Unknown``), as JSON would have it."""
    assert body.startswith(MAGIC)
    envelope = dict(_fields(body[len(MAGIC) :]))
    kind = dict(_fields(envelope[1]))
    api_version, name = kind[1].decode(), kind[2].decode()
    found: dict[str, Any] = {"apiVersion": api_version, "kind": name}
    binary = name == "Secret"
    for number, value in _fields(envelope[2]):
        if number == 1:
            found["metadata"] = _metadata(value)
        elif number == 2 and name in ("Secret", "ConfigMap"):
            key, text = _entry(value)
            encoded = base64.b64encode(text).decode() if binary else text.decode()
            found.setdefault("data", {})[key] = encoded
        elif number == 3 and binary:
            found["type"] = value.decode()
    return found


def _metadata(data: bytes) -> dict[str, Any]:
    found: dict[str, Any] = {}
    texts = {1: "name", 2: "generateName", 3: "namespace", 5: "uid", 6: "resourceVersion"}
    for number, value in _fields(data):
        if number in texts and value:
            found[texts[number]] = value.decode()
        elif number in (11, 12):
            key, text = _entry(value)
            found.setdefault("labels" if number == 11 else "annotations", {})[key] = text.decode()
    return found


def _entry(data: bytes) -> tuple[str, bytes]:
    parts = dict(_fields(data))
    return parts.get(1, b"").decode(), parts.get(2, b"")


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Number and value of each field; bytes where the wire has a length, else a number."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        if key & 7 == 2:
            length, at = _varint(data, at)
            yield key >> 3, data[at : at + length]
            at += length
        elif key & 7 == 0:
            value, at = _varint(data, at)
            yield key >> 3, value
        else:
            raise ValueError(f"wire type {key & 7}")


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return value, at
