# SPDX-License-Identifier: Apache-2.0
"""Finding and reading profiles. The files travel inside the package."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from kimi_k3.errors import ExitCode, OperatorError, nearest
from kimi_k3.profiles.inherit import merged
from kimi_k3.profiles.schema import Evidence, Flag, Gpu, Profile, Timeout, Variable


def profile_names() -> tuple[str, ...]:
    """Names of all profiles, sorted."""
    return tuple(sorted(_files()))


def load_profile(name: str) -> Profile:
    """The profile called ``name``, with what it inherits.

    Raises:
        OperatorError: there is no such profile (names the nearest one), or its file is not valid.
    """
    return parse_profile(_read(name), name=name)


def parse_profile(text: str, *, name: str) -> Profile:
    """Read a profile's YAML text; ``name`` is what its file is called.

    Raises:
        OperatorError: the text is not YAML, repeats a key, extends what it may not, or does not fit the
            schema; names the first offending place.
    """
    document = _parse(text, name)
    if (base := document.get("extends")) is not None:
        known = _files()
        if not isinstance(base, str) or base not in known:
            raise _broken(name, f"extends: there is no profile {base!r}", remedy=nearest(str(base), known))
        try:
            document = merged(_parse(_read(base), base), document)
        except ValueError as error:
            raise _broken(name, str(error)) from None
    try:
        profile = Profile.model_validate(document)
    except ValidationError as error:
        raise _invalid(name, error) from None
    if profile.name != name:
        raise _broken(name, f"name: is {profile.name!r}, must be the file's name")
    return profile


def _parse(text: str, name: str) -> dict[str, Any]:
    try:
        document = yaml.load(text, Loader=_UniqueKeyLoader)
    except yaml.YAMLError as error:
        raise _broken(name, " ".join(str(error).split())) from None
    if not isinstance(document, dict):
        raise _broken(name, "the file: must be a mapping")
    return document


def _invalid(name: str, error: ValidationError) -> OperatorError:
    first = error.errors(include_url=False, include_input=False)[0]
    # What concerns the file as a whole has no place in it.
    where = f"{'.'.join(map(str, first['loc']))}: " if first["loc"] else ""
    if first["type"] == "extra_forbidden":
        return _broken(name, f"{where}there is no such key", remedy=nearest(str(first["loc"][-1]), _keys()))
    return _broken(name, where + first["msg"].removeprefix("Value error, "))


def _keys() -> set[str]:
    models: tuple[type[BaseModel], ...] = (Profile, Gpu, Timeout, Evidence, Flag, Variable)
    return {key for model in models for key in model.model_fields}


def _broken(name: str, why: str, remedy: str = "correct the file") -> OperatorError:
    return OperatorError(f"profile {name}.yaml: {why}", remedy=remedy, exit_code=ExitCode.USAGE)


def _read(name: str) -> str:
    files = _files()
    if name not in files:
        raise OperatorError(
            f"--profile {name!r}: there is no such profile",
            remedy=nearest(name, files),
            exit_code=ExitCode.USAGE,
        )
    return files[name].read_text(encoding="utf-8")


def _files() -> Mapping[str, Traversable]:
    folder = resources.files("kimi_k3.profiles")
    return {
        entry.name.removesuffix(".yaml"): entry for entry in folder.iterdir() if entry.name.endswith(".yaml")
    }


class _UniqueKeyLoader(yaml.SafeLoader):
    """A safe loader that refuses a key given twice, which YAML libraries let pass silently."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key.value!r} is given twice", key.start_mark
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep)
