# SPDX-License-Identifier: Apache-2.0
"""Finding and reading profiles. The files travel inside the package."""

from __future__ import annotations

from collections.abc import Hashable
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Any

import yaml
from pydantic import ValidationError

from kimi_k3.errors import ExitCode, OperatorError, nearest
from kimi_k3.profiles.schema import Profile


def profile_names() -> tuple[str, ...]:
    """Names of all profiles, sorted."""
    return tuple(sorted(_files()))


def load_profile(name: str) -> Profile:
    """The profile called ``name``.

    Raises:
        OperatorError: there is no such profile (names the nearest one), or its file is not valid.
    """
    files = _files()
    if name not in files:
        raise OperatorError(
            f"--profile {name!r}: there is no such profile",
            remedy=nearest(name, files),
            exit_code=ExitCode.USAGE,
        )
    return parse_profile(files[name].read_text(encoding="utf-8"), name=name)


def parse_profile(text: str, *, name: str) -> Profile:
    """Read a profile's YAML text; ``name`` is what its file is called.

    Raises:
        OperatorError: the text is not YAML, repeats a key, or does not fit the schema; names the
            first offending place.
    """
    try:
        profile = Profile.model_validate(yaml.load(text, Loader=_UniqueKeyLoader))
    except yaml.YAMLError as error:
        raise _broken(name, " ".join(str(error).split())) from None
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise _broken(name, f"{where}: {first['msg']}") from None
    if profile.name != name:
        raise _broken(name, f"name: is {profile.name!r}, must be the file's name")
    return profile


def _broken(name: str, why: str) -> OperatorError:
    return OperatorError(f"profile {name}.yaml: {why}", remedy="correct the file", exit_code=ExitCode.USAGE)


def _files() -> dict[str, Traversable]:
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
