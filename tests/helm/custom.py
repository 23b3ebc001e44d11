# SPDX-License-Identifier: Apache-2.0
"""Objects of kinds that others define, against their definitions: ``python -m tests.helm.custom FILE...``.

The files are CustomResourceDefinitions as their projects publish them, which are not kept here. Fields that a
definition does not know are errors; its rules in CEL are not read.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import yaml

from tests.helm.cases import CASES, GATEWAYS
from tests.helm.rendering import MONITORING, Object, rendered

Schemas = dict[tuple[str, str], dict[str, Any]]
"""By API version and kind."""


def schemas(definitions: list[Object]) -> Schemas:
    """Those of every version that is served, made strict."""
    return {
        (f"{each['spec']['group']}/{version['name']}", each["spec"]["names"]["kind"]): strict(
            version["schema"]["openAPIV3Schema"]
        )
        for each in definitions
        for version in each["spec"]["versions"]
        if version["served"]
    }


def strict(schema: Any, *, top: bool = True) -> Any:
    """A schema by which no field is taken that it does not name, but for an object's metadata."""
    if isinstance(schema, list):
        return [strict(each, top=False) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: strict(value, top=False) for key, value in schema.items()}
    if made.get("x-kubernetes-int-or-string"):
        made.pop("type", None)
    named = "properties" in made and made.get("type") == "object"
    if named and not made.get("x-kubernetes-preserve-unknown-fields"):
        made["additionalProperties"] = False
    if top:
        made["properties"]["metadata"] = {"type": "object"}
    return made


def errors(known: Schemas, found: list[Object]) -> Iterator[str]:
    """What is wrong with the objects whose kind is known, a line each."""
    for each in found:
        schema = known.get((each["apiVersion"], each["kind"]))
        if schema is not None:
            for error in jsonschema.Draft7Validator(schema).iter_errors(each):
                yield f"{each['kind']} {error.json_path}: {error.message[:300]}"


def main(paths: list[str]) -> int:
    """Every case; 1 if something is wrong, or if no object of one of the definitions was rendered."""
    known = schemas([yaml.safe_load(Path(path).read_text()) for path in paths])
    wrong, seen = 0, set()
    for case, values in CASES.items():
        found = rendered(values, apis=(*MONITORING, *GATEWAYS))
        seen |= {(each["apiVersion"], each["kind"]) for each in found} & set(known)
        for line in errors(known, found):
            print(f"{case}: {line}")
            wrong += 1
    print(f"{len(CASES)} cases, {wrong} errors; seen: {', '.join(' '.join(each) for each in sorted(seen))}")
    unseen = {kind for _, kind in known} - {kind for _, kind in seen}
    print(f"not rendered: {', '.join(sorted(unseen)) or 'none'}")
    return int(bool(wrong or unseen))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
