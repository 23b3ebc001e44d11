# SPDX-License-Identifier: Apache-2.0
"""A profile with some values changed by an operator, checked like any profile. Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
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

DTYPES = ("auto", "bfloat16", "float", "float16", "float32", "half")
"""vLLM's choices for ``--dtype`` (0.32.0 and 0.33.0)."""

COUNTS = (
    "--max-model-len",
    "--max-num-seqs",
    "--max-num-batched-tokens",
    "--block-size",
    "--distributed-timeout-seconds",
)
"""Flags of vLLM whose value is a whole number from 1 on."""

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
    known = [flag.removeprefix("--") for flag in sorted(flags)]
    names = [*(name.replace("_", "-") for name in (*SIZES, *TIMEOUTS)), *known]
    changes: dict[str, Any] = {}
    given = []
    for setting in settings:
        name, equals, text = setting.partition("=")
        given.append(f"--set {setting!r}")
        if name not in names:
            raise _usage(given[-1], f"there is no {name!r} to set", nearest(name, names))
        if not equals:
            raise _usage(given[-1], "has no value", f"write --set {name}=VALUE")
        key = name.replace("-", "_")
        changes[key if key in (*SIZES, *TIMEOUTS) else f"--{name}"] = _value(text)
    return changed(profile, changes, given=" ".join(given)) if changes else profile


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
        if name in SIZES:
            document[name] = value
        elif name in TIMEOUTS:
            document[name] = {"seconds": value, "why": WHY}
        elif value is False:
            document["flags"].pop(name, None)
        else:
            _check_value(name, value, document["flags"].get(name), given)
            document["flags"][name] = {"value": None if value is True else value, "why": WHY}
    try:
        return Profile.model_validate_json(json.dumps(document))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise _usage(given, first["msg"].removeprefix("Value error, "), "give other values") from None


def _check_value(name: str, value: Any, before: dict[str, Any] | None, given: str) -> None:
    """Refuse what vLLM's parser would refuse, or take for something else."""
    if name in COUNTS and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise _usage(given, f"{name} must be a whole number from 1 on", "give one")
    if name == "--dtype" and value not in DTYPES:
        raise _usage(given, f"there is no type {value!r}", nearest(str(value), DTYPES))
    if before is None:
        return
    was = before["value"]
    if (was is None) is not (value is True):
        kind = "is a switch" if was is None else "needs a value"
        raise _usage(given, f"{name} {kind}", "write =true or =false" if was is None else f"e.g. ={was}")
    number = isinstance(was, int | float)
    if number and not (isinstance(value, int | float) and math.isfinite(value)):
        raise _usage(given, f"{name} must be a number", f"give one, e.g. {was}")


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
