# SPDX-License-Identifier: Apache-2.0
"""An installed vLLM against the recorded versions. Nothing of it is imported."""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from kimi_k3.contract import source
from kimi_k3.contract.facts import Reliance, Use, relied_on
from kimi_k3.contract.record import Contract, Definition, contracts, is_release, release


@dataclass(frozen=True)
class Comparison:
    """What was found.

    Attributes:
        known: whether the version is one of the recorded releases.
        nearest: the recorded version that was compared with.
        missing: what is not there, or takes other parameters: nobody can go on without it.
        changed: what is there with other lines than recorded.
        facts: how many were looked at.
    """

    known: bool
    nearest: str
    missing: tuple[str, ...]
    changed: tuple[str, ...]
    facts: int

    @property
    def as_recorded(self) -> bool:
        """The version and every line that matters are recorded ones."""
        return self.known and not self.missing and not self.changed

    def difference(self) -> str:
        """What is different, in an operator's words."""
        found = [*self.missing, *self.changed]
        whose = "" if self.known else f"it is none of the recorded releases; compared with {self.nearest}, "
        if not found:
            return f"{whose}all {self.facts} facts are as in {self.nearest}"
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        return f"{whose}{found[0]}{more}"


def compare(package: Path, version: str | None, uses: Collection[Use]) -> Comparison:
    """Compare vLLM in ``package`` with the recorded version that is nearest to ``version``.

    Args:
        package: vLLM's own directory.
        version: that it says it has; ``None`` if it says none.
        uses: in which circumstances it will be built on.
    """
    contract = nearest(version)
    facts = relied_on(frozenset(uses))
    trees: dict[str, ast.Module | str] = {}
    missing, changed = [], []
    for fact in facts:
        tree = trees.setdefault(fact.file, source.parse(package / fact.file))
        if (lack := source.lacking(tree, fact)) is not None:
            missing.append(f"{lack}: {fact.why}")
        elif change := _change(package, tree, fact, contract):
            changed.append(f"{fact.name} in {fact.file} {change}: {fact.why}")
    known = version is not None and is_release(version) and release(version) == contract.numbers
    return Comparison(known, contract.version, tuple(missing), tuple(changed), len(facts))


def nearest(version: str | None) -> Contract:
    """The recorded version that is ``version``, else the last before it, else the first."""
    numbers = None if version is None else release(version)
    if numbers is None:
        return contracts()[-1]
    return next((each for each in reversed(contracts()) if each.numbers <= numbers), contracts()[0])


def look_at(package: Path, tree: ast.Module | str, fact: Reliance) -> Definition | None:
    """What can be recorded of a fact; ``None`` if it is not there."""
    node = None if isinstance(tree, str) else source.find(tree, fact.name)
    if node is None:
        return None
    function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    variable = isinstance(node, ast.Assign | ast.AnnAssign)
    return Definition(
        parameters=source.parameters(node) if function else None,
        sha256=source.digest(package / fact.file, node) if function or variable else None,
    )


def _change(package: Path, tree: ast.Module | str, fact: Reliance, contract: Contract) -> str | None:
    recorded, found = contract.definition(fact.file, fact.name), None
    with contextlib.suppress(OSError):
        found = look_at(package, tree, fact)
    if recorded is None:
        return f"is not recorded for {contract.version}"
    if found is None:
        return "cannot be read"
    if found.parameters != recorded.parameters:
        return f"takes ({_listed(found)}) and not ({_listed(recorded)}) as in {contract.version}"
    if found.sha256 != recorded.sha256:
        return f"has other lines than in {contract.version}"
    return None


def _listed(definition: Definition) -> str:
    return ", ".join(definition.parameters or ())
