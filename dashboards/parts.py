# SPDX-License-Identifier: Apache-2.0
"""What all dashboards are made of: queries, panels, variables, and their JSON.

Each panel has a description, a unit, and a sentence for when there is nothing to show: a blank panel does not
say whether all is well or nothing is scraped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from grafana_foundation_sdk.builders import (
    bargauge,
    common,
    prometheus,
    stat,
    statetimeline,
    table,
    timeseries,
)
from grafana_foundation_sdk.builders import dashboard as builders
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common as kinds
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

from dashboards.series import ONES, TENS
from kimi_k3.sidecar import metrics as m
from kimi_k3.words.phases import Phase

WIDTH = 24
"""Columns of Grafana's grid; a row of it is 38 pixels, so a screen of 1080 lines shows 23."""

SOURCE = kinds.DataSourceRef(type_val="prometheus", uid="${datasource}")
NOT_THERE = "It is not scraped, or the chosen namespace and release are not there."

PHASE_COLOURS = {
    Phase.PENDING: "#8e8e8e",
    Phase.PREFLIGHT: "light-purple",
    Phase.DOWNLOADING: "purple",
    Phase.LOADING: "blue",
    Phase.CONVERTING: "dark-blue",
    Phase.COMPILING: "light-yellow",
    Phase.CAPTURING: "yellow",
    Phase.WARMING: "light-green",
    Phase.READY: "green",
    Phase.DRAINING: "orange",
    Phase.STOPPED: "#6e6e6e",
    Phase.FAILED: "red",
}

Builder = stat.Panel | bargauge.Panel | timeseries.Panel | statetimeline.Panel | table.Panel
Words = Mapping[int, tuple[str, str]]
"""What a number is shown as: a word and a colour."""

NOTHING = "-"
"""What stands in a table's cell for a label that is empty."""

NO_YES: Words = {0: ("no", "orange"), 1: ("yes", "green")}
PHASES: Words = {phase.position: (phase.value, PHASE_COLOURS[phase]) for phase in Phase}


def over_time(expression: str, legend: str = "") -> prometheus.Dataquery:
    """A query for all of the chosen time; in ``legend``, ``{{label}}`` stands for a label's value."""
    return _query(expression).legend_format(legend).range()


def now(expression: str, legend: str = "") -> prometheus.Dataquery:
    """A query for the present values."""
    return _query(expression).legend_format(legend).instant()


def present(expression: str) -> prometheus.Dataquery:
    """A query for the present values as a table: a row a series and a column a label."""
    return _query(expression).format(PromQueryFormat.TABLE).instant()


def _query(expression: str) -> prometheus.Dataquery:
    return prometheus.Dataquery().expr(expression).datasource(SOURCE)


def number(
    title: str,
    *queries: prometheus.Dataquery,
    about: str,
    unit: str,
    empty: str,
    width: int,
    height: int = 4,
    words: Words | None = None,
    limits: Mapping[float, str] | None = None,
    named: bool = False,
) -> Builder:
    """One large value for each series; ``empty`` must be short, since it stands in its place.

    Args:
        words: shown instead of numbers.
        limits: colours from a value on; green below.
        named: show the series' name also where there is only one.
    """
    shown = kinds.BigValueTextMode.VALUE_AND_NAME if named else kinds.BigValueTextMode.AUTO
    panel = stat.Panel().graph_mode(kinds.BigValueGraphMode.NONE).text_mode(shown)
    panel = panel.reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
    return _dressed(panel, title, queries, about, unit, empty, width, height, words, limits)


def bars(
    title: str,
    *queries: prometheus.Dataquery,
    about: str,
    unit: str,
    empty: str,
    width: int,
    height: int,
    whole: float | None = None,
    limits: Mapping[float, str] | None = None,
) -> Builder:
    """A horizontal bar for each series, of ``whole`` if that is known."""
    panel = bargauge.Panel().orientation(kinds.VizOrientation.HORIZONTAL)
    panel = panel.display_mode(kinds.BarGaugeDisplayMode.BASIC).min(0)
    panel = panel.reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
    if whole is not None:
        panel = panel.max(whole)
    return _dressed(panel, title, queries, about, unit, empty, width, height, None, limits)


def lines(
    title: str,
    *queries: prometheus.Dataquery,
    about: str,
    unit: str,
    empty: str,
    width: int,
    height: int,
    whole: float | None = None,
    many: bool = False,
) -> Builder:
    """A line over time for each series, from 0 on; of ``many`` the legend is a table to scroll in."""
    legend = common.VizLegendOptions().show_legend(True).placement(kinds.LegendPlacement.BOTTOM)
    legend = legend.display_mode(kinds.LegendDisplayMode.LIST)
    if many:
        legend = legend.display_mode(kinds.LegendDisplayMode.TABLE).placement(kinds.LegendPlacement.RIGHT)
        legend = legend.calcs(["lastNotNull"]).sort_by("Last *").sort_desc(True)
    panel = timeseries.Panel().legend(legend).min(0).fill_opacity(5)
    panel = panel.tooltip(common.VizTooltipOptions().mode(kinds.TooltipDisplayMode.MULTI))
    if whole is not None:
        panel = panel.max(whole)
    return _dressed(panel, title, queries, about, unit, empty, width, height)


def timeline(
    title: str,
    *queries: prometheus.Dataquery,
    about: str,
    empty: str,
    width: int,
    height: int,
    words: Words,
) -> Builder:
    """A row over time for each series, whose numbers are shown as words."""
    panel = statetimeline.Panel().merge_values(True).show_value(kinds.VisibilityMode.AUTO)
    panel = panel.legend(common.VizLegendOptions().show_legend(False))
    return _dressed(panel, title, queries, about, "none", empty, width, height, words)


def rows(
    title: str,
    of: prometheus.Dataquery,
    *,
    about: str,
    empty: str,
    width: int,
    height: int,
    columns: Mapping[str, str],
    unit: str = "none",
) -> Builder:
    """A table with a row for each series.

    Args:
        columns: fields to show and what they are called, in this order; ``Value`` is the series' value.
    """
    shown = {name: position for position, name in enumerate(columns)}
    chosen = models.DataTransformerConfig(
        id_val="filterFieldsByName", options={"include": {"names": list(columns)}}
    )
    ordered = models.DataTransformerConfig(
        id_val="organize", options={"indexByName": shown, "renameByName": dict(columns), "excludeByName": {}}
    )
    panel = table.Panel().with_transformation(chosen).with_transformation(ordered)
    # Grafana writes the sentence for an empty panel into each cell of an empty label, too.
    panel = panel.override_by_field_type(
        "string", [models.DynamicConfigValue(id_val="noValue", value=NOTHING)]
    )
    return _dressed(panel, title, (of,), about, unit, empty, width, height)


def by_ten(
    title: str,
    of: prometheus.Dataquery,
    *,
    about: str,
    unit: str,
    empty: str,
    width: int,
    height: int,
    reddest: float,
    decimals: int,
) -> Builder:
    """A heat map of numbered things: a cell for each, ten in a row, from green at 0 to red.

    Args:
        of: a table of values by :data:`~dashboards.series.TENS` and :data:`~dashboards.series.ONES`.
        reddest: from this value on a cell is as red as can be.
    """
    number_of = {"targetField": TENS, "destinationType": "number"}
    cell = f"{TENS}\\{ONES}"
    titles = {cell: "from"} | {str(digit): f"+{digit}" for digit in range(10)}
    order = {name: place for place, name in enumerate(titles)}
    steps: list[tuple[str, dict[str, object]]] = [
        ("convertFieldType", {"conversions": [number_of]}),
        ("sortBy", {"sort": [{"field": TENS}]}),
        ("convertFieldType", {"conversions": [number_of | {"destinationType": "string"}]}),
        (
            "groupingToMatrix",
            {"rowField": TENS, "columnField": ONES, "valueField": "Value", "emptyValue": "null"},
        ),
        ("organize", {"indexByName": order, "renameByName": titles, "excludeByName": {}}),
    ]
    nothing = models.ValueMappingResult(text=" ", color="transparent", index=0)
    blank = models.DashboardSpecialValueMapOptions(match=models.SpecialValueMatch.NULL, result=nothing)
    panel = table.Panel().cell_height(kinds.TableCellHeight.SM).min(0).max(reddest).decimals(decimals)
    panel = panel.min_width(50).cell_options(kinds.TableColoredBackgroundCellOptions())
    panel = panel.color_scheme(builders.FieldColor().mode(models.FieldColorModeId.CONTINUOUS_GR_YL_RD))
    panel = panel.mappings([models.SpecialValueMap(options=blank)])
    plain = {"type": kinds.TableCellDisplayMode.AUTO.value}
    panel = panel.override_by_field_type(
        "string",
        [
            models.DynamicConfigValue(id_val="custom.cellOptions", value=plain),
            models.DynamicConfigValue(id_val="decimals", value=0),
        ],
    )
    for name, options in steps:
        panel = panel.with_transformation(models.DataTransformerConfig(id_val=name, options=options))
    return _dressed(panel, title, (of,), about, unit, empty, width, height)


def _dressed(
    panel: Builder,
    title: str,
    queries: Sequence[prometheus.Dataquery],
    about: str,
    unit: str,
    empty: str,
    width: int,
    height: int,
    words: Words | None = None,
    limits: Mapping[float, str] | None = None,
) -> Builder:
    panel = panel.title(title).description(about).unit(unit).no_value(empty).datasource(SOURCE)
    panel = panel.span(width).height(height)
    for letter, one in zip("ABCDEFGH", queries, strict=False):
        panel = panel.with_target(one.ref_id(letter))
    if words is not None:
        results = {
            str(value): models.ValueMappingResult(text=text, color=colour, index=index)
            for index, (value, (text, colour)) in enumerate(words.items())
        }
        panel = panel.mappings([models.ValueMap(options=results)])
    steps = [models.Threshold(value=None, color="green")]
    steps += [models.Threshold(value=value, color=colour) for value, colour in (limits or {}).items()]
    if not isinstance(panel, table.Panel | timeseries.Panel):
        by_limit = builders.FieldColor().mode(models.FieldColorModeId.THRESHOLDS)
        panel = panel.color_scheme(by_limit).thresholds(
            builders.ThresholdsConfig().mode(models.ThresholdsMode.ABSOLUTE).steps(steps)
        )
    return panel


def source_variable() -> builders.DatasourceVariable:
    """Which Prometheus."""
    return builders.DatasourceVariable("datasource").label("Prometheus").type("prometheus")


def choice(name: str, label: str, series: str) -> builders.QueryVariable:
    """A variable of all values that a label has in ``series``, of which any or All may be chosen."""
    everything = models.VariableOption(selected=True, text=["All"], value=["$__all"])
    expression = f"label_values({series}, {name})"
    made = builders.QueryVariable(name).label(label).datasource(SOURCE).definition(expression)
    made = made.query({"qryType": 1, "query": expression, "refId": name})
    made = made.refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED).sort(
        models.VariableSort.ALPHABETICAL_ASC
    )
    return made.multi(True).include_all(True).all_value(".*").current(everything)


def written(name: str, label: str, about: str) -> builders.TextBoxVariable:
    """A variable that is typed in; empty at first."""
    nothing = models.VariableOption(selected=True, text="", value="")
    return builders.TextBoxVariable(name).label(label).description(about).default_value("").current(nothing)


def of_releases() -> list[builders.QueryVariable]:
    """Of which deployments: every sidecar tells of its build, whatever it knows of a start."""
    return [choice("namespace", "Namespace", m.BUILD.name), choice("release", "Release", m.BUILD.name)]


def board(
    name: str,
    about: str,
    variables: Sequence[builders.QueryVariable | builders.TextBoxVariable],
    panels: Sequence[Builder],
) -> builders.Dashboard:
    """A dashboard whose panels stand one after the other, row by row."""
    made = builders.Dashboard(f"Kimi-K3: {name}").uid(f"kimi-k3-{name}").description(about)
    made = made.tags(["kimi-k3"]).readonly().refresh("10s").time("now-1h", "now")
    made = made.tooltip(models.DashboardCursorSync.CROSSHAIR).with_variable(source_variable())
    others = builders.DashboardLink("Kimi-K3").type(models.DashboardLinkType.DASHBOARDS).tags(["kimi-k3"])
    made = made.link(others.include_vars(True).keep_time(True).placement("")).annotations([])
    for variable in variables:
        made = made.with_variable(variable)
    for number, panel in enumerate(panels, start=1):
        made = made.with_panel(panel.id(number))
    return made


def as_json(made: builders.Dashboard) -> str:
    """The dashboard as Grafana reads it; the same one gives the same text."""
    return JSONEncoder(sort_keys=True, indent=1).encode(made.build()) + "\n"
