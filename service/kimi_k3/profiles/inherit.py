# SPDX-License-Identifier: Apache-2.0
"""One profile on top of another: whole entries replace whole entries, one level deep. Pure.

A profile that extends another says only what is different. It never merges into an entry: a value and
its reason belong together. What a profile says about itself is never inherited.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

OWN = ("schema_version", "name", "title", "summary", "verified", "evidence", "extends")
"""Keys that are about one file: a base's title, and who tried it, say nothing about another."""

TABLES = ("flags", "environment", "left_open")
"""Keys whose entries are replaced one by one; ``null`` removes the base's."""


def merged(base: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """The document of a profile, complete with what it inherits.

    Raises:
        ValueError: the base itself extends another, or an entry changes nothing; says where.
    """
    name = own["extends"]
    if base.get("extends") is not None:
        raise ValueError(
            f"extends: {name} itself extends {base['extends']}, and one level is the limit, so that a reader "
            f"needs two files at most; extend {base['extends']}"
        )
    result = {key: value for key, value in base.items() if key not in OWN}
    for key, value in own.items():
        if key in TABLES and isinstance(value, Mapping) and isinstance(base.get(key), Mapping):
            result[key] = _table(key, name, base[key], value)
        elif key in base and key not in OWN and base[key] == value:
            raise ValueError(f"{key}: says what {name} says already; remove it")
        else:
            result[key] = value
    return result


def _table(key: str, name: str, base: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for entry, value in own.items():
        if entry in base and base[entry] == value:
            raise ValueError(f"{key}.{entry}: says what {name} says already; remove it")
        if value is not None:
            result[entry] = value
        elif entry in base:
            del result[entry]
        else:
            raise ValueError(
                f"{key}.{entry}: there is nothing to remove, {name} has no such entry; drop the line"
            )
    return result
