# SPDX-License-Identifier: Apache-2.0
"""The dashboards' JSON: made anew, whole, readable without data; test_panels.py has some."""

from __future__ import annotations

import itertools
import json
from typing import Any

import promql_parser
import pytest
from dashboards.__main__ import DIRECTORY, texts
from dashboards.parts import WIDTH
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

from tests.observability.expressions import VALUES, panels, substituted
from tests.observability.known import known
from tests.observability.lint import lint, lint_labels

BOARDS: dict[str, dict[str, Any]] = {
    path.name: json.loads(path.read_text()) for path in DIRECTORY.glob("*.json")
}
PANELS = [
    pytest.param(panel, id=f"{name}: {panel['title']}")
    for name, board in sorted(BOARDS.items())
    for panel in panels(board)
]
FIRST_SCREEN = 23
"""Rows of the grid on a screen of 1080 lines."""


def test_the_files_are_what_the_source_makes() -> None:
    """An edit by hand would be lost with the next one, and a change of the source would not reach anybody."""
    made = {path.name: path.read_text() for path in DIRECTORY.glob("*.json")}
    assert made == texts(), "run `python -m dashboards`"


@pytest.mark.parametrize("name", BOARDS)
def test_grafanas_own_model_knows_every_field(name: str) -> None:
    """No Grafana could be had to load it; what its official model reads and writes again is the same.

    But for the links, of which that model forgets half when it reads them.
    """
    register_default_plugins()
    given = {key: value for key, value in BOARDS[name].items() if key != "links"}
    again = json.loads(JSONEncoder().encode(Dashboard.from_json(given)))
    assert without_nothing(again) == without_nothing(given)


def without_nothing(value: Any) -> Any:
    """Without fields that say nothing."""
    if isinstance(value, dict):
        kept = {key: without_nothing(each) for key, each in value.items()}
        return {key: each for key, each in kept.items() if each not in (None, {}, [])}
    return [without_nothing(each) for each in value] if isinstance(value, list) else value


@pytest.mark.parametrize("name", BOARDS)
def test_the_grid(name: str) -> None:
    """No panel covers another one, hangs over the edge or leaves a gap; what matters stands on one screen."""
    taken: dict[tuple[int, int], str] = {}
    for panel in BOARDS[name]["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= WIDTH, panel["title"]
        cells = itertools.product(range(place["w"]), range(place["h"]))
        for cell in ((place["x"] + x, place["y"] + y) for x, y in cells):
            assert cell not in taken, f"{panel['title']} covers {taken.get(cell)}"
            taken[cell] = panel["title"]
    assert len(taken) == WIDTH * (1 + max(y for _, y in taken)), "a gap"
    stats = [panel["gridPos"]["y"] for panel in BOARDS[name]["panels"] if panel["type"] == "stat"]
    assert stats[0] == 0
    assert len({title for (_, y), title in taken.items() if y < FIRST_SCREEN}) >= 8


@pytest.mark.parametrize("name", BOARDS)
def test_identities(name: str) -> None:
    """Links and alerts point at them."""
    board = BOARDS[name]
    assert board["uid"] == f"kimi-k3-{name.removesuffix('.json')}"
    ids = [panel["id"] for panel in panels(board)]
    assert len(set(ids)) == len(ids)
    titles = [panel["title"] for panel in panels(board)]
    assert len(set(titles)) == len(titles)


@pytest.mark.parametrize("name", BOARDS)
def test_variables(name: str) -> None:
    """Which Prometheus, namespace and release is chosen above, and anything may be; each variable is used."""
    variables = {each["name"]: each for each in BOARDS[name]["templating"]["list"]}
    assert {"datasource"} < set(variables)
    if name != "node.json":
        assert {"namespace", "release"} <= set(variables)
    text = json.dumps([panel["targets"] for panel in panels(BOARDS[name])])
    for variable in variables:
        assert f"${variable}" in text or f"${{{variable}}}" in text, variable
        if variables[variable]["type"] == "query":
            assert variables[variable]["includeAll"]
            assert variables[variable]["multi"]
            assert variables[variable]["allValue"] == VALUES[variable]


@pytest.mark.parametrize("name", BOARDS)
def test_variables_find_values(name: str) -> None:
    """A list that is filled from a metric or a label that is gone has All and nothing else to choose."""
    for variable in BOARDS[name]["templating"]["list"]:
        if variable["type"] == "query":
            asked = substituted(variable["query"]["query"]).removeprefix("label_values(").removesuffix(")")
            series, label = asked.split(", ")
            assert label == variable["name"]
            assert lint(series, known()) == []
            assert lint_labels(series, [label], known()) == []


@pytest.mark.parametrize("panel", PANELS)
def test_a_panel_asks_for_what_is_chosen(panel: dict[str, Any], request: pytest.FixtureRequest) -> None:
    """A series that is asked for without the variables is another release's, under the chosen one's name."""
    of_vllm = {"model_name", "engine"} if "serving.json" in request.node.name else set()
    for target in panel["targets"]:
        for selector in selectors(substituted(target["expr"], CHOSEN)):
            assert selector.name is not None
            series = known().series[selector.name]
            by = {"exporter": {"hostname"}}.get(series.family.source, {"namespace", "release"} | of_vllm)
            matched = {one.name: one.value for one in selector.matchers.matchers}
            for label in by & (series.labels or by):
                assert matched.get(label) == CHOSEN[label], selector


CHOSEN = {name: f"the-chosen-{name}" for name in VALUES} | {"prefix": "", "__rate_interval": "1m"}


def selectors(expression: str) -> list[promql_parser.VectorSelector]:
    """Every series that an expression asks for."""
    found: list[promql_parser.VectorSelector] = []

    def visit(node: promql_parser.Expr) -> None:
        if isinstance(node, promql_parser.MatrixSelector):
            found.append(node.vector_selector)
        elif isinstance(node, promql_parser.VectorSelector):
            found.append(node)

    promql_parser.walk(promql_parser.parse(expression), visit)
    assert found
    return found


@pytest.mark.parametrize("panel", PANELS)
def test_a_panel_explains_itself(panel: dict[str, Any]) -> None:
    """What it is about, in which unit, and what it means when there is nothing: a blank one says neither."""
    defaults = panel["fieldConfig"]["defaults"]
    assert len(panel["description"].split()) >= 4
    assert panel["description"].endswith(".")
    assert defaults["unit"]
    assert len(defaults["noValue"].split()) >= 2
    assert defaults["noValue"].endswith((".", ")"))
    assert panel["targets"]
    for target in panel["targets"]:
        assert target["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert target["expr"]


def test_they_fit_into_a_config_map() -> None:
    """Kubernetes takes a MiB, and `kubectl apply` a quarter of that in its annotation."""
    assert all(len(text) < 256 * 1024 for text in texts().values())
