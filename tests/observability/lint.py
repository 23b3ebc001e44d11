# SPDX-License-Identifier: Apache-2.0
"""What is wrong with a PromQL expression that Prometheus itself would answer with nothing, or with nonsense.

A renamed metric, a wrong label, a sum that lost ``le`` are no errors to Prometheus: the panel stays empty and
the alert never fires. So every expression is parsed, and the labels of its parts are followed through it.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass, replace

import promql_parser as promql

from tests.observability.known import ANY, Family, Kind, Known, Series, is_share

_RATES = frozenset({"rate", "irate", "increase", "resets"})
_PRESENCE = frozenset({"absent", "absent_over_time", "present_over_time", "timestamp"})
"""They ask whether a series is there, not what its value is."""

_COUNTING = frozenset({"count", "group", "count_values"})
_SAMPLING = frozenset({"topk", "bottomk", "limitk", "limit_ratio"})
"""Aggregations that let whole series through."""


@dataclass(frozen=True)
class Shape:
    """What an expression evaluates to.

    Attributes:
        vector: whether it has labels at all; a scalar and a text have not.
        labels: that its series may have; ``None`` if nobody knows.
        sources: programs that tell it.
        share: whether its values are parts of a whole, or other quotients.
        bucket: whether its series are a histogram's, told apart by ``le``.
        fixed: labels that a matcher sets to one value.
    """

    vector: bool = True
    labels: frozenset[str] | None = None
    sources: frozenset[str] = frozenset()
    share: bool = False
    bucket: bool = False
    fixed: frozenset[str] = frozenset()


_SCALAR = Shape(vector=False, labels=frozenset())


def lint(expression: str, known: Known) -> list[str]:
    """Everything wrong with an expression, one line each; variables must have been replaced.

    Args:
        expression: PromQL.
        known: the series that there may be.
    """
    return _read(expression, known)[1]


def lint_labels(expression: str, labels: Iterable[str], known: Known) -> list[str]:
    """Which of ``labels``, that a legend or an annotation shows, no series of the expression's result has."""
    shape = _read(expression, known)[0]
    problems: list[str] = []
    if shape is not None:
        _require(labels, shape.labels, f"{{{{...}}}} of the result of {expression}", problems)
    return problems


def recorded(name: str, expression: str, known: Known) -> Family:
    """The metric that a recording rule makes of an expression."""
    shape = _read(expression, known)[0]
    labels = shape.labels if shape else None
    quotient = is_share(name) or bool(shape and shape.share)
    source = next(iter(shape.sources)) if shape and len(shape.sources) == 1 else ANY
    return Family(name, "share" if quotient else "gauge", labels, source)


def _read(expression: str, known: Known) -> tuple[Shape | None, list[str]]:
    reader = _Reader(known)
    try:
        parsed = promql.parse(expression)
    except ValueError as error:
        return None, [f"{expression}: is no PromQL: {error}"]
    shape = reader.shape(parsed)
    return shape, list(dict.fromkeys(reader.problems))


class _Reader:
    """Goes through an expression and collects what is wrong."""

    def __init__(self, known: Known) -> None:
        self._known = known
        self.problems: list[str] = []

    def shape(self, node: promql.Expr, asked_by: str = "") -> Shape:
        """What ``node`` evaluates to; ``asked_by`` is the function whose argument it is, if it matters."""
        match node:
            case promql.NumberLiteral() | promql.StringLiteral():
                return _SCALAR
            case promql.ParenExpr() | promql.UnaryExpr() | promql.SubqueryExpr():
                return self.shape(node.expr, asked_by)
            case promql.MatrixSelector():
                return self._selected(node.vector_selector, asked_by)
            case promql.VectorSelector():
                return self._selected(node, asked_by)
            case promql.Call():
                return self._called(node)
            case promql.AggregateExpr():
                return self._aggregated(node)
            case promql.BinaryExpr():
                return self._combined(node)
        raise AssertionError(f"{type(node).__name__} of {node} is not known to the linter")

    def _selected(self, node: promql.VectorSelector, asked_by: str) -> Shape:
        matchers = node.matchers.matchers + [one for more in node.matchers.or_matchers for one in more]
        name = node.name
        if name is None:
            names = [
                one.value for one in matchers if one.name == "__name__" and one.op == promql.MatchOp.Equal
            ]
            name = names[0] if names else None
        if name is None:
            self.problems.append(f"{node}: names no metric, so nobody can tell what it finds")
            return Shape()
        series = self._known.series.get(name)
        if series is None:
            self.problems.append(f"{name}: {self._missing(name)}")
            return Shape()
        self._used(name, series.kind, asked_by)
        others = [one for one in matchers if one.name != "__name__"]
        _require((one.name for one in others), series.labels, f"matcher of {name}", self.problems)
        for one in others:
            self._value(name, series, one)
        fixed = frozenset(one.name for one in others if one.op == promql.MatchOp.Equal and one.value)
        return Shape(
            labels=series.labels,
            sources=frozenset({series.family.source}),
            share=series.kind == "share",
            bucket=series.bucket and "le" not in fixed,
            fixed=fixed,
        )

    def _missing(self, name: str) -> str:
        if name in self._known.not_series:
            return self._known.not_series[name]
        near = difflib.get_close_matches(name, self._known.series, n=1, cutoff=0.5)
        return "there is no such metric" + (f"; the nearest is {near[0]}" if near else "")

    def _used(self, name: str, kind: Kind, asked_by: str) -> None:
        if kind == "counter" and asked_by not in _RATES | _PRESENCE | _COUNTING:
            self.problems.append(f"{name}: is a counter, which only tells with rate() or increase()")
        if kind in ("gauge", "share") and asked_by in _RATES:
            self.problems.append(f"{name}: is a gauge, so {asked_by}() of it means nothing; use delta()")

    def _value(self, name: str, series: Series, matcher: promql.Matcher) -> None:
        values = series.family.values.get(matcher.name)
        if values is None:
            return
        exact = matcher.op in (promql.MatchOp.Equal, promql.MatchOp.NotEqual)
        given = [matcher.value] if exact else matcher.value.split("|")
        for value in given:
            plain = value.replace("_", "").replace("-", "").isalnum()
            if value and plain and value not in values:
                near = difflib.get_close_matches(value, values, n=1, cutoff=0)[0]
                self.problems.append(
                    f"{name}: {matcher.name} is never {value!r}; the nearest value is {near!r}"
                )

    def _called(self, node: promql.Call) -> Shape:
        name = node.func.name
        shapes = [self.shape(one, name) for one in node.args]
        vectors = [shape for shape in shapes if shape.vector]
        if name in ("scalar", "time", "pi") or not vectors:
            return replace(_SCALAR, vector=name not in ("scalar", "time", "pi"))
        (of, *_) = vectors
        if name in ("absent", "absent_over_time"):
            return Shape(labels=of.fixed)
        if name == "histogram_quantile":
            if not of.bucket and of.labels is not None:
                self.problems.append(
                    f"{node}: histogram_quantile() needs a histogram's _bucket series with le"
                )
            return replace(of, bucket=False, labels=of.labels and of.labels - {"le"})
        if name in ("label_replace", "label_join"):
            texts = [one.val for one in node.args if isinstance(one, promql.StringLiteral)]
            sources = [texts[2]] if name == "label_replace" else texts[2:]
            _require(sources, of.labels, f"{name}()", self.problems)
            return replace(of, labels=of.labels and of.labels | {texts[0]})
        if name == "sum_over_time" and of.share:
            self.problems.append(f"{node}: sums a ratio; use avg_over_time()")
        if name in ("changes", "count_over_time", "present_over_time", "timestamp"):
            return replace(of, share=False)
        return of

    def _aggregated(self, node: promql.AggregateExpr) -> Shape:
        operation = str(node.op)
        of = self.shape(node.expr, operation)
        if operation == "sum" and of.share:
            self.problems.append(f"{node}: sums a ratio; take avg(), max(), or the ratio of two sums")
        if operation in _SAMPLING:
            return of
        labels = self._grouped(node, of)
        if operation == "count_values" and isinstance(node.param, promql.StringLiteral):
            labels = labels and labels | {node.param.val}
        if of.bucket and labels is not None and "le" not in labels and operation not in _COUNTING:
            self.problems.append(
                f"{node}: adds the buckets of a histogram up, which count each other; keep le, or fix it"
            )
        return replace(
            of,
            labels=labels,
            share=of.share and operation not in _COUNTING,
            fixed=of.fixed & (labels or set()),
        )

    def _grouped(self, node: promql.AggregateExpr, of: Shape) -> frozenset[str] | None:
        if node.modifier is None:
            return frozenset()
        named = frozenset(node.modifier.labels)
        by = node.modifier.type == promql.AggModifierType.By
        word = "by" if by else "without"
        _require(
            named, of.labels, f"{word} ({', '.join(node.modifier.labels)}) of {node.expr}", self.problems
        )
        if by:
            return named
        return None if of.labels is None else of.labels - named

    def _combined(self, node: promql.BinaryExpr) -> Shape:
        operation = str(node.op)
        left, right = self.shape(node.lhs), self.shape(node.rhs)
        if not (left.vector and right.vector):
            of = left if left.vector else right
            truth = node.modifier is not None and node.modifier.return_bool
            return replace(of, share=of.share and not truth)
        matching = node.modifier.matching if node.modifier else None
        named = frozenset(matching.labels) if matching else frozenset()
        only_named = matching is not None and matching.type == promql.LabelModifierType.Include
        word = "on" if only_named else "ignoring"
        for side in (left, right) if only_named else ():
            _require(named, side.labels, f"{word} ({', '.join(sorted(named))}) of {node}", self.problems)
        both = None if left.labels is None or right.labels is None else left.labels | right.labels
        if not only_named:
            _require(named, both, f"{word} ({', '.join(sorted(named))}) of {node}", self.problems)
            if operation != "or":
                self._can_match(node, left, right, named)
        return self._joined(node, left, right, named if only_named else None, named)

    def _can_match(self, node: promql.BinaryExpr, left: Shape, right: Shape, ignored: frozenset[str]) -> None:
        if left.labels is None or right.labels is None:
            return
        different = (left.labels ^ right.labels) - ignored
        if different:
            self.problems.append(
                f"{node}: no series of one side has the labels of the other, which differ in "
                f"{', '.join(sorted(different))}; write on (...)"
            )
        elif "instance" in left.labels - ignored and self._apart(left.sources, right.sources):
            self.problems.append(
                f"{node}: different programs tell the sides, so instance is never the same; write on (...)"
            )

    @staticmethod
    def _apart(left: frozenset[str], right: frozenset[str]) -> bool:
        return ANY not in left | right and left.isdisjoint(right)

    def _joined(
        self,
        node: promql.BinaryExpr,
        left: Shape,
        right: Shape,
        on: frozenset[str] | None,
        named: frozenset[str],
    ) -> Shape:
        operation = str(node.op)
        share = left.share or right.share
        if operation == "/":
            share = True
        elif operation == "*":
            share = left.share and right.share
        card = node.modifier.card if node.modifier else promql.VectorMatchCardinality.OneToOne
        many, one = left, right
        if card == promql.VectorMatchCardinality.OneToMany:
            many, one = right, left
        grouped = card in (
            promql.VectorMatchCardinality.ManyToOne,
            promql.VectorMatchCardinality.OneToMany,
        )
        if grouped:
            brought = frozenset((node.modifier.group_labels if node.modifier else None) or ())
            _require(brought, one.labels, f"group_left or group_right of {node}", self.problems)
            labels = None if many.labels is None else many.labels | brought
        elif operation in ("and", "unless"):
            labels = left.labels
        elif operation == "or":
            labels = None if left.labels is None or right.labels is None else left.labels | right.labels
        elif on is not None:
            labels = on
        else:
            labels = None if left.labels is None else left.labels - named
        return replace(many, labels=labels, share=share, sources=left.sources | right.sources)


def _require(named: Iterable[str], there: frozenset[str] | None, where: str, problems: list[str]) -> None:
    """Report those labels that are not there."""
    if there is None:
        return
    for label in named:
        if label not in there:
            near = difflib.get_close_matches(label, there, n=1, cutoff=0.5)
            hint = f"; the nearest is {near[0]}" if near else ""
            has = ", ".join(sorted(there)) or "none"
            problems.append(f"{where}: has no label {label}{hint} (its labels: {has})")
