# SPDX-License-Identifier: Apache-2.0
"""The dashboards as files: made from their source, as Grafana's models have them, never blank."""

from __future__ import annotations

import json
from typing import Any

import promql_parser
import pytest
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

from dashboards.__main__ import DIRECTORY, texts
from tests.observability.expressions import VALUES, panels, substituted
from tests.observability.known import known
from tests.observability.lint import lint, lint_labels

BOARDS: dict[str, dict[str, Any]] = {name: json.loads(text) for name, text in texts().items()}
PANELS = [(name, panel) for name, board in BOARDS.items() for panel in panels(board)]
SCREEN = 23
"""Rows of Grafana's grid, of 38 pixels, on a screen of 1080 lines, below the browser's and Grafana's bars."""

CHOSEN = {name: f"chosen-{name}" for name in VALUES}

each_board = pytest.mark.parametrize("board", BOARDS.values(), ids=BOARDS)
each_panel = pytest.mark.parametrize(
    "panel", [panel for _, panel in PANELS], ids=[f"{name}: {panel['title']}" for name, panel in PANELS]
)


def test_files_are_made_from_the_source() -> None:
    """Nobody edits the JSON: it would be lost with the next change."""
    files = {path.name: path.read_text() for path in DIRECTORY.glob("*.json")}
    assert files == texts(), "run `python -m dashboards`"


@each_board
def test_grafanas_models_take_them(board: dict[str, Any]) -> None:
    """A misspelt option would be ignored by Grafana; read by its published models, nothing may be lost."""
    register_default_plugins()
    again = JSONEncoder(sort_keys=True).encode(Dashboard.from_json(board))
    assert json.loads(again) == board


@each_board
def test_layout(board: dict[str, Any]) -> None:
    """Panels neither overlap nor leave gaps, and none is cut by the lower end of the first screen."""
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert max(x for x, _ in cells) < 24
        assert not cells & taken, panel["title"]
        taken |= cells
        assert place["y"] >= SCREEN or place["y"] + place["h"] <= SCREEN, panel["title"]
    for row in {y for _, y in taken}:
        assert {x for x, y in taken if y == row} == set(range(24))


@each_board
def test_variables(board: dict[str, Any]) -> None:
    """Source, namespace and release can be chosen everywhere, All at first; what fills the lists is there."""
    variables = {one["name"]: one for one in board["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    assert {"namespace", "release"} <= variables.keys()
    for name, one in variables.items():
        if one["type"] != "query":
            continue
        assert (one["multi"], one["includeAll"], one["allValue"]) == (True, True, VALUES[name])
        assert one["current"]["value"] == ["$__all"]
        series, _, label = one["query"]["query"].removeprefix("label_values(").rstrip(")").partition(", ")
        assert label == name
        assert lint(substituted(series), known()) == []
        assert lint_labels(substituted(series), [label], known()) == []
    for panel in panels(board):
        for target in panel["targets"]:
            substituted(target["expr"], dict.fromkeys(variables, "x") | {"__rate_interval": "1m"})


def test_names() -> None:
    """Grafana knows dashboards by their uid, and panels by their id."""
    assert {board["uid"] for board in BOARDS.values()} == {
        f"kimi-k3-{name}" for name in ("start", "serving", "node", "fleet")
    }
    for board in BOARDS.values():
        assert [panel["id"] for panel in board["panels"]] == list(range(1, len(board["panels"]) + 1))
        assert board["editable"] is False
        assert "id" not in board


@each_panel
def test_panel_explains_itself(panel: dict[str, Any]) -> None:
    """Also when there is nothing: a sentence then stands in its place, short where it is one large value's."""
    defaults = panel["fieldConfig"]["defaults"]
    assert panel["description"].endswith(".")
    assert defaults["unit"]
    assert defaults["noValue"].endswith(".")
    if panel["type"] == "stat":
        assert len(defaults["noValue"]) <= 8 * panel["gridPos"]["w"]
    sources = [panel["datasource"], *(target["datasource"] for target in panel["targets"])]
    assert all(one == {"type": "prometheus", "uid": "${datasource}"} for one in sources)


@each_panel
def test_panel_asks_for_what_is_chosen(panel: dict[str, Any]) -> None:
    """A selector without the variables would show another release's figures under the chosen one's name."""
    for target in panel["targets"]:
        expression = substituted(target["expr"], CHOSEN | {"__rate_interval": "1m", "prefix": ""})
        selectors: list[promql_parser.VectorSelector] = []

        def visit(node: promql_parser.Expr, found: list[promql_parser.VectorSelector] = selectors) -> None:
            if isinstance(node, promql_parser.VectorSelector):
                found.append(node)
            if isinstance(node, promql_parser.MatrixSelector):
                found.append(node.vector_selector)

        promql_parser.walk(promql_parser.parse(expression), visit)
        assert selectors
        for selector in selectors:
            assert selector.name is not None
            series = known().series[selector.name]
            wanted = {"hostname"} if series.family.source == "exporter" else {"namespace", "release"}
            if panel in panels(BOARDS["serving.json"]) and selector.name.startswith("vllm:"):
                wanted |= {"model_name", "engine"} & (series.labels or set())
            matched = {one.name: one.value for one in selector.matchers.matchers}
            assert {name: matched.get(name) for name in wanted} == {name: CHOSEN[name] for name in wanted}
