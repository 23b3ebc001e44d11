# SPDX-License-Identifier: Apache-2.0
"""Every value is known and of its type, at every level, or Helm says which is not."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from tests.helm.cases import CASES, EVERYTHING, GATEWAYS, of_profile
from tests.helm.programs import HELM_3, HELM_4, Release
from tests.helm.rendering import CHART, MONITORING, Refused, Values, merged, rendered, template

APIS = (*MONITORING, *GATEWAYS)
DEFAULTS: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())
SCHEMA: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text())
FULL = merged(
    merged(DEFAULTS, EVERYTHING),
    {"networkPolicy": {"clients": [{"podSelector": {"matchLabels": {"a": "b"}}}]}},
)
"""Every key that there is, with a value."""

Path = tuple[str | int, ...]
FREE = {("global",), ("overrides",), ("engine", "env"), ("model", "download", "env")}
"""Names below these are the operator's own."""


def levels(value: Any, path: Path = ()) -> Iterator[Path]:
    """Where an object of the values is, lists included."""
    if isinstance(value, dict):
        yield path
        for key, inner in value.items():
            yield from levels(inner, (*path, key))
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from levels(inner, (*path, number))


def leaves(value: Any, path: Path = ()) -> Iterator[Path]:
    """Where a value is that holds no further ones."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from leaves(inner, (*path, key))
    else:
        yield path


def at(values: Any, path: Path) -> Any:
    """The value there."""
    for part in path:
        values = values[part]
    return values


def put(values: Values, path: Path, new: Any) -> dict[str, Any]:
    """A copy in which something else is there."""
    made = copy.deepcopy(dict(values))
    at(made, path[:-1])[path[-1]] = new
    return made


def refusal(values: Values) -> str:
    """What Helm says of values that the schema refuses."""
    with pytest.raises(Refused) as refused:
        template(values, apis=(*MONITORING, *GATEWAYS))
    assert "don't meet the specifications of the schema" in str(refused.value)
    return str(refused.value)


def dotted(path: Path) -> str:
    """As a test's name."""
    return ".".join(map(str, path)) or "root"


def test_the_full_values_are_taken() -> None:
    """Else what follows would be refused for another reason."""
    assert rendered(FULL, apis=(*MONITORING, *GATEWAYS))


MAPS = {("scheduling", "nodeSelector"), ("service", "annotations"), ("monitoring", "dashboards", "labels")}
MAPS |= {("multiNode", "podAnnotations"), ("multiNode", "rdmaResources")}
MAPS |= {("monitoring", kind, "additionalLabels") for kind in ("serviceMonitor", "rules")}
STRICT = [
    path
    for path in levels(FULL)
    if path not in FREE | MAPS and path[-1:] not in (("matchLabels",), ("requests",), ("limits",))
]


@pytest.mark.parametrize("path", STRICT, ids=dotted)
def test_a_misspelt_key(path: Path) -> None:
    """A typo three levels down must not be left without effect (case 50): of every key, each is named."""
    typos = {f"{key}x": value for key, value in at(FULL, path).items()}
    said = refusal(put(FULL, path, {**at(FULL, path), **typos}) if path else {**FULL, **typos})
    assert typos
    assert [typo for typo in typos if f"'{typo}'" not in said] == []
    assert ("/" + "/".join(map(str, path)) if path else "''") in said


@pytest.mark.parametrize("path", [path for path in leaves(FULL) if path[:1] != ("overrides",)], ids=dotted)
def test_a_wrong_type(path: Path) -> None:
    """A value of another type is refused with the place named."""
    wrong: Any = {"neither": ["this", "nor"]} if not isinstance(at(FULL, path), dict) else 7
    assert "/" + "/".join(map(str, path)) in refusal(put(FULL, path, wrong))


@pytest.mark.parametrize(
    "path", [path for path in leaves(DEFAULTS) if at(DEFAULTS, path) is not None], ids=dotted
)
def test_a_null(path: Path) -> None:
    """It takes the default away: nil in a template is 0, an empty name, or the opposite of what was meant."""
    values = put(merged(DEFAULTS, of_profile("ep8")), path, None)
    if path in ABOUT_NULL or path[:-1] in MAPS or path[-2:-1] in (("requests",), ("limits",)):
        assert template(values)
        return
    assert "missing propert" in refusal(values)


ABOUT_NULL = {("security", "runAsUser"), ("security", "fsGroup")}
"""Null has a meaning of its own."""

TEXTS = [path for path in leaves(FULL) if isinstance(at(FULL, path), str)]


@pytest.mark.parametrize("path", TEXTS, ids=dotted)
def test_a_placeholder(path: Path) -> None:
    """What was copied from a guide and not filled in is no value."""
    assert "/" + "/".join(map(str, path)) in refusal(put(FULL, path, "<NODE>"))


@pytest.mark.parametrize("path", TEXTS, ids=dotted)
def test_a_control_character(path: Path) -> None:
    """One in a name or an address would break the manifest that it stands in, or hide in it."""
    refusal(put(FULL, path, "a\nb: c"))


def test_strict_at_every_level() -> None:
    """An object without `additionalProperties` takes every typo."""
    loose = [
        place
        for place, part in objects_of(SCHEMA)
        if part.get("additionalProperties", True) is True and place != "/properties/global"
    ]
    assert loose == []


def objects_of(schema: Any, place: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Each part of the schema that describes an object."""
    if isinstance(schema, dict):
        if schema.get("type") == "object":
            yield place, schema
        for key, inner in schema.items():
            yield from objects_of(inner, f"{place}/{key}")
    elif isinstance(schema, list):
        for number, inner in enumerate(schema):
            yield from objects_of(inner, f"{place}/{number}")


def test_every_value_is_in_the_schema() -> None:
    """And nothing else is: a key that no template reads is a promise that nobody keeps."""
    named = set(SCHEMA["properties"]) - {"global", "enabled"}
    assert named == set(DEFAULTS)


@pytest.fixture
def parent(tmp_path: Any) -> Any:
    """A chart that depends on ours."""
    parent = tmp_path / "parent"
    (parent / "charts").mkdir(parents=True)
    (parent / "charts" / "kimi-k3-gfx942").symlink_to(CHART)
    (parent / "Chart.yaml").write_text(
        "apiVersion: v2\nname: parent\nversion: 1.0.0\n"
        "dependencies: [{name: kimi-k3-gfx942, version: 0.1.0, condition: kimi-k3-gfx942.enabled}]\n"
    )
    return parent


@pytest.mark.parametrize("release", [HELM_3, HELM_4], ids=["helm-3", "helm-4"])
@pytest.mark.parametrize("case", CASES)
def test_the_same_as_a_subchart(parent: Any, case: str, release: Release) -> None:
    """Helm lays values over each other in another way there, null above all, and the objects are the same."""
    alone, below = (
        sorted(rendered(values, chart=chart, apis=APIS, release=release), key=str)
        for values, chart in ((CASES[case], CHART), ({"kimi-k3-gfx942": CASES[case]}, parent))
    )
    assert below == alone


def test_as_a_subchart(parent: Any) -> None:
    """A parent chart hands its values below our name, a condition and what is global."""
    values = {"global": {"imageRegistry": "x"}, "kimi-k3-gfx942": {**of_profile("ep8"), "enabled": True}}
    assert {"Deployment", "Service"} <= {found["kind"] for found in rendered(values, chart=parent)}
    values["kimi-k3-gfx942"]["enabled"] = False
    assert rendered(values, chart=parent) == []
    values["kimi-k3-gfx942"] |= {"enabled": True, "mispelt": 1}
    with pytest.raises(Refused, match="'mispelt'"):
        template(values, chart=parent)
