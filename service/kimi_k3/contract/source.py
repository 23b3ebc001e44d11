# SPDX-License-Identifier: Apache-2.0
"""Facts about a package's source, found by parsing it: nothing of it is imported or run."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kimi_k3.files import read_small

MAX_SOURCE_BYTES = 4 << 20
Scope = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, kw_only=True)
class Fact:
    """Something that a package's source must have.

    Attributes:
        file: below the package's directory.
        name: dotted: a class, a function, a method, a variable, or what is imported from another module.
        parameters: that the function must take.
        key: that the dictionary, written out under this name, must have.
        attribute: that the class must set on itself (``self.attribute = ...``).
        why: what needs it.
    """

    file: str
    name: str
    parameters: tuple[str, ...] = ()
    key: str | None = None
    attribute: str | None = None
    why: str


def missing(package: Path, fact: Fact) -> str | None:
    """What of ``fact`` does not hold in a package; ``None`` if all of it does."""
    return lacking(parse(package / fact.file), fact)


def lacking(tree: ast.Module | str, fact: Fact) -> str | None:
    """What of ``fact`` does not hold in its file, parsed; ``None`` if all of it does."""
    if isinstance(tree, str):
        return f"{fact.file} {tree}"
    node = find(tree, fact.name)
    if node is None:
        return f"{fact.file} has no {fact.name}"
    if fact.parameters:
        has = set(parameters(node))
        if absent := [name for name in fact.parameters if name not in has]:
            return f"{fact.name} in {fact.file} takes no {', '.join(absent)}"
    if fact.key is not None and fact.key not in keys(node):
        return f"{fact.name} in {fact.file} has no {fact.key!r}"
    if fact.attribute is not None and fact.attribute not in attributes(node):
        return f"{fact.name} in {fact.file} sets no {fact.attribute}"
    return None


def parse(path: Path) -> ast.Module | str:
    """The module in a file, or why there is none."""
    try:
        return ast.parse(read_small(path, limit=MAX_SOURCE_BYTES))
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return "cannot be parsed"


def digest(path: Path, node: ast.stmt) -> str:
    """SHA-256 of the lines of a definition, decorators included, as hexadecimal digits.

    Of the text and not of the tree, which is another one in every version of Python. Indentation and
    trailing blanks do not count, so that a definition that was only moved below an ``if`` is the same.

    Raises:
        OSError: the file cannot be read.
    """
    lines = read_small(path, limit=MAX_SOURCE_BYTES).splitlines()
    first = min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", ()))])
    kept = [line.strip() for line in lines[first - 1 : node.end_lineno]]
    return hashlib.sha256(b"\n".join(kept)).hexdigest()


def find(tree: Scope, name: str) -> ast.stmt | None:
    """The definition of a dotted name; behind ``if`` and ``try``, too. The last one counts."""
    first, _, rest = name.partition(".")
    for node in reversed(list(_definitions(tree.body))):
        if _defines(node, first):
            if not rest:
                return node
            return find(node, rest) if isinstance(node, ast.ClassDef) else None
    return None


def parameters(node: ast.AST) -> tuple[str, ...]:
    """Names that a function takes."""
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return ()
    found = node.args
    return tuple(each.arg for each in (*found.posonlyargs, *found.args, *found.kwonlyargs))


def keys(node: ast.AST) -> set[str]:
    """Keys of a dictionary that is written out."""
    value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
    if not isinstance(value, ast.Dict):
        return set()
    return {key.value for key in value.keys if isinstance(key, ast.Constant) and isinstance(key.value, str)}


def attributes(node: ast.AST) -> set[str]:
    """What a class sets on ``self``."""
    return {
        each.attr
        for each in ast.walk(node)
        if isinstance(each, ast.Attribute)
        and isinstance(each.ctx, ast.Store)
        and isinstance(each.value, ast.Name)
        and each.value.id == "self"
    }


def text_constant(path: Path, name: str) -> str | None:
    """A text that a module assigns to ``name``."""
    tree = parse(path)
    node = None if isinstance(tree, str) else find(tree, name)
    value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
    return value.value if isinstance(value, ast.Constant) and isinstance(value.value, str) else None


def _definitions(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        yield node
        for part in ("body", "orelse", "finalbody"):
            if isinstance(node, ast.If | ast.Try | ast.With):
                yield from _definitions(getattr(node, part, []))
        for handler in getattr(node, "handlers", []):
            yield from _definitions(handler.body)


def _defines(node: ast.stmt, name: str) -> bool:
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return node.name == name
    if isinstance(node, ast.ImportFrom):
        return any(name == (alias.asname or alias.name) for alias in node.names)
    targets = node.targets if isinstance(node, ast.Assign) else ()
    if isinstance(node, ast.AnnAssign):
        targets = [node.target]
    return any(isinstance(target, ast.Name) and target.id == name for target in targets)
