# SPDX-License-Identifier: Apache-2.0
"""A profile with some values changed by an operator, checked like any profile. Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Any

from pydantic import ValidationError

from kimi_k3.errors import ExitCode, OperatorError, nearest
from kimi_k3.profiles.schema import Profile
from kimi_k3.profiles.values import SWITCHES
from kimi_k3.words.weights import ScaleRule, Weights

WHY = "set by the operator"
"""The reason of everything that an operator changes: the profile's own was about another value."""

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
TIMEOUTS = ("start_timeout", "drain_timeout", "readiness_delay")

_CHOICES: dict[str, type[StrEnum]] = {"weights": Weights, "scale_rule": ScaleRule}
_WORDS = {"true": True, "false": False, "null": None}


def with_settings(profile: Profile, settings: Iterable[str], flags: Iterable[str]) -> Profile:
    """``profile`` with ``settings`` in place; only all of them together must make a valid profile.

    Args:
        profile: to begin with.
        settings: ``name=value`` each: a size as ``tensor-parallel-size=4``, a number of seconds as
            ``start-timeout=3600``, or a vLLM flag as ``max-model-len=65536``; a switch is set by ``=true``,
            and any flag is removed by ``=false``.
        flags: all flags that profiles know, ``--`` included.

    Raises:
        OperatorError: a name that nobody knows (names the nearest), or a value that the profile cannot have.
    """
    names = settable(flags)
    changes: dict[str, Any] = {}
    given: list[str] = []
    for setting in settings:
        name, equals, text = setting.partition("=")
        given.append(f"--set {setting!r}")
        if name not in names:
            raise _usage(given[-1], f"there is no {name!r} to set", nearest(name, names))
        if not equals or not text:
            raise _usage(given[-1], "has no value", f"write --set {name}=VALUE")
        key = name.replace("-", "_")
        key = key if key in (*SIZES, *TIMEOUTS) else f"--{name}"
        if key in changes:
            raise _usage(given[-1], f"{name} is given twice", "give it once")
        changes[key] = _value(text)
        _check_value(profile, key, changes[key], given[-1])
    return changed(profile, changes, given=" ".join(given)) if changes else profile


def settable(flags: Iterable[str]) -> list[str]:
    """Every name that :func:`with_settings` knows.

    Args:
        flags: that profiles know, ``--`` included.
    """
    own = [name.replace("_", "-") for name in (*SIZES, *TIMEOUTS)]
    return [*own, *(flag.removeprefix("--") for flag in sorted(flags))]


def changed(profile: Profile, changes: Mapping[str, Any], *, given: str) -> Profile:
    """``profile`` with some values changed.

    Args:
        profile: to begin with.
        changes: by name, which is one of :data:`SIZES` or :data:`TIMEOUTS`, or a flag with its ``--``. Of a
            flag, ``True`` sets a switch and ``False`` removes it.
        given: what the operator wrote, for messages.

    Raises:
        OperatorError: the profile cannot have those values.
    """
    document = profile.model_dump(mode="json")
    for name, value in changes.items():
        _check_value(profile, name, value, given)
        if name in SIZES:
            document |= {name: value, "sizes_why": WHY}
        elif name in TIMEOUTS:
            document[name] = {"seconds": value, "why": WHY}
        elif value is False:
            document["flags"].pop(name, None)
        else:
            document["flags"][name] = {"value": None if value is True else value, "why": WHY}
    if changes.keys() & {"nodes", "data_parallel_size"} and "data_parallel_size_local" not in changes:
        document["data_parallel_size_local"] = max(1, document["data_parallel_size"] // document["nodes"])
    try:
        return Profile.model_validate_json(json.dumps(document))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        reason = first["msg"].removeprefix("Value error, ")
    if len(changes) == 1:
        # What was given names it already.
        for name, value in changes.items():
            reason = reason.removeprefix(f"{name} {value}: ")
    # A rule ends in what to do about it, if that is not plain.
    what, _, remedy = reason.rpartition("; ")
    raise _usage(given, what or remedy, remedy if what else "give another value")


def _check_value(profile: Profile, name: str, value: Any, given: str) -> None:
    """Refuse what no profile could hold, in an operator's words instead of the schema's."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    if name in TIMEOUTS:
        if not whole or value < 0:
            raise _usage(given, "must be a whole number of seconds", "give one from 0 on")
    elif name in _CHOICES:
        choices = [choice.value for choice in _CHOICES[name]]
        if value not in choices:
            raise _usage(given, "there is no such choice", nearest(str(value), choices))
    elif name == "expert_parallel":
        if not isinstance(value, bool):
            raise _usage(given, "must be true or false", "write =true or =false")
    elif name in SIZES:
        if not whole or value < 1:
            raise _usage(given, "must be a whole number", "give one from 1 on")
    elif name in SWITCHES:
        if not isinstance(value, bool):
            raise _usage(given, f"{name} is a switch", "write =true or =false")
    elif value is None or value is True:
        raise _usage(given, f"{name} needs a value", "give one, or =false to leave the flag out")
    elif value is not False and (why := profile.left_open.get(name)) is not None:
        raise _usage(
            given,
            f"profile {profile.name} leaves {name} alone ({why})",
            "leave it out, or write a profile that decides it (CONTRIBUTING.md)",
        )


def _value(text: str) -> Any:
    if text in _WORDS:
        return _WORDS[text]
    try:
        return int(text)
    except ValueError:
        pass
    try:
        number = float(text)
    except ValueError:
        return text
    return number if math.isfinite(number) else text


def _usage(given: str, what: str, remedy: str) -> OperatorError:
    return OperatorError(f"{given}: {what}", remedy=remedy, exit_code=ExitCode.USAGE)
