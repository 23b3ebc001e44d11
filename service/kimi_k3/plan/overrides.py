# SPDX-License-Identifier: Apache-2.0
"""A profile with some values changed by an operator, checked like any profile. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from pydantic import ValidationError

from kimi_k3.errors import ExitCode, OperatorError, nearest
from kimi_k3.profiles.schema import Profile

WHY = "an operator's choice for this start"

SIZES = (
    "nodes",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "data_parallel_size",
    "data_parallel_size_local",
    "decode_context_parallel_size",
    "expert_parallel",
    "weights",
    "scale_rule",
)
"""Keys of a profile that an operator may set as they are; those below hold a number with a reason."""
TIMEOUTS = ("start_timeout", "drain_timeout")

_WORDS = {"true": True, "false": False, "null": None}


def with_settings(profile: Profile, settings: Iterable[str], flags: Iterable[str]) -> Profile:
    """``profile`` with ``settings`` in place.

    Args:
        profile: to begin with.
        settings: ``name=value`` each: a size as ``tensor-parallel-size=4``, a number of seconds as
            ``start-timeout=3600``, or a vLLM flag as ``max-model-len=65536``; a switch is set by ``=true``
            and removed by ``=false``.
        flags: all flags that profiles know, ``--`` included.

    Raises:
        OperatorError: a name that nobody knows (names the nearest), or a value that the profile cannot have.
    """
    known = [flag.removeprefix("--") for flag in sorted(flags)]
    names = [*(name.replace("_", "-") for name in (*SIZES, *TIMEOUTS)), *known]
    for setting in settings:
        name, equals, text = setting.partition("=")
        given = f"--set {setting!r}"
        if not equals or name not in names:
            what = "must be name=value" if not equals else f"there is no {name!r} to set"
            raise _usage(given, what, nearest(name, names))
        key = name.replace("-", "_")
        profile = changed(
            profile, key if key in (*SIZES, *TIMEOUTS) else f"--{name}", _value(text), given=given
        )
    return profile


def changed(profile: Profile, name: str, value: Any, *, given: str) -> Profile:
    """``profile`` with one value changed.

    Args:
        profile: to begin with.
        name: one of :data:`SIZES` or :data:`TIMEOUTS`, or a flag with its ``--``.
        value: of a flag, ``True`` sets a switch and ``False`` removes the flag.
        given: what the operator wrote, for messages.

    Raises:
        OperatorError: the profile cannot have that value.
    """
    document = profile.model_dump(mode="json")
    if name in SIZES:
        document[name] = value
    elif name in TIMEOUTS:
        document[name] = {"seconds": value, "why": WHY}
    elif value is False:
        document["flags"].pop(name, None)
    else:
        before = document["flags"].get(name, {}).get("value")
        if isinstance(before, int | float) and (
            isinstance(value, bool) or not isinstance(value, int | float)
        ):
            raise _usage(given, "must be a number", f"give one, e.g. {before}")
        document["flags"][name] = {"value": None if value is True else value, "why": WHY}
    try:
        return Profile.model_validate_json(json.dumps(document))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise _usage(given, first["msg"].removeprefix("Value error, "), "give another value") from None


def _value(text: str) -> Any:
    if text in _WORDS:
        return _WORDS[text]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _usage(given: str, what: str, remedy: str) -> OperatorError:
    return OperatorError(f"{given}: {what}", remedy=remedy, exit_code=ExitCode.USAGE)
