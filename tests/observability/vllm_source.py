# SPDX-License-Identifier: Apache-2.0
"""vLLM's metrics as its source defines them: parsed, not imported, so all that there may be."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

PREFIX = "vllm:"
_MADE_BY = re.compile(r"_?(gauge|counter|histogram)(_cls)?", re.IGNORECASE)
_USUAL = frozenset({"model_name", "engine"})
"""What ``PrometheusStatLogger`` calls ``labelnames`` and gives to all that make metrics for it."""

Kind = Literal["gauge", "counter", "histogram"]
Families = dict[str, tuple[Kind, frozenset[str] | None]]


def vllm_families(package: Path) -> Families:
    """Type and labels of each metric by its name in the source; computed labels are ``None``."""
    found: Families = {}
    for path in sorted(package.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if f'"{PREFIX}' in text:
            found.update(families_in(ast.parse(text)))
    return found


def families_in(tree: ast.Module) -> Families:
    """The same of one module."""
    texts = _texts(tree)
    found: Families = {}
    for scope in ast.walk(tree):
        if not isinstance(scope, ast.FunctionDef):
            continue
        assigned = _assignments(scope)
        for call in ast.walk(scope):
            made = _MADE_BY.fullmatch(_last_name(call.func)) if isinstance(call, ast.Call) else None
            if made is None or not isinstance(call, ast.Call):
                continue
            kind = _KINDS[made[1].lower()]
            for name in _names(_argument(call, "name", 0), texts, scope, assigned):
                found[name] = kind, _labels(_argument(call, "labelnames", 2), assigned)
    return found


def finish_reasons(package: Path) -> frozenset[str]:
    """Values of the label ``finished_reason``."""
    tree = ast.parse((package / "v1" / "engine" / "__init__.py").read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Assign) and _last_name(node.targets[0]) == "FINISH_REASON_STRINGS":
            return frozenset(ast.literal_eval(node.value))
    raise AssertionError("vllm/v1/engine/__init__.py has no FINISH_REASON_STRINGS")


_KINDS: dict[str, Kind] = {"gauge": "gauge", "counter": "counter", "histogram": "histogram"}


def _names(
    node: ast.expr | None, texts: dict[str, str], scope: ast.FunctionDef, assigned: dict[str, list[ast.expr]]
) -> Iterator[str]:
    """The name of a metric; one that is a loop's variable stands first in a tuple of the same function."""
    if isinstance(node, ast.Constant):
        names = [node.value]
    elif not isinstance(node, ast.Name):
        return
    elif node.id in texts:
        names = [texts[node.id]]
    elif node.id in assigned:
        names = [value.value for value in assigned[node.id] if isinstance(value, ast.Constant)]
    else:
        rows = [one for one in ast.walk(scope) if isinstance(one, ast.Tuple) and len(one.elts) > 1]
        names = [row.elts[0].value for row in rows if isinstance(row.elts[0], ast.Constant)]
    yield from (name for name in names if isinstance(name, str) and name.startswith(PREFIX))


def _labels(node: ast.expr | None, assigned: dict[str, list[ast.expr]]) -> frozenset[str] | None:
    if node is None:
        return frozenset()
    if isinstance(node, ast.List | ast.Tuple):
        texts = [one.value for one in node.elts if isinstance(one, ast.Constant)]
        return frozenset(map(str, texts)) if len(texts) == len(node.elts) else None
    if isinstance(node, ast.BinOp):
        left, right = _labels(node.left, assigned), _labels(node.right, assigned)
        return None if left is None or right is None else left | right
    if _last_name(node) in ("labelnames", "_labelnames"):
        return _USUAL
    if isinstance(node, ast.Name) and len(assigned.get(node.id, [])) == 1:
        return _labels(assigned[node.id][0], assigned)
    return None


def _argument(call: ast.Call, name: str, position: int) -> ast.expr | None:
    for keyword in call.keywords:
        if keyword.arg == name:
            return keyword.value
    return call.args[position] if len(call.args) > position else None


def _assignments(scope: ast.FunctionDef) -> dict[str, list[ast.expr]]:
    found: dict[str, list[ast.expr]] = {}
    for node in ast.walk(scope):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                found.setdefault(_last_name(target), []).append(node.value)
    return found


def _texts(tree: ast.Module) -> dict[str, str]:
    """Names that the module gives to texts."""
    return {
        _last_name(node.targets[0]): node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    }


def _last_name(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""
