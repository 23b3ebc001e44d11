# SPDX-License-Identifier: Apache-2.0
"""The environment variables by which the supervisor, the engine plugin and the sidecar agree.

Each name is written here once; the engine's processes inherit them from the supervisor. An operator
may set those in ``OF_OPERATORS``; the others are set by the supervisor for its child.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator, Field, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from kimi_k3.errors import ExitCode, OperatorError
from kimi_k3.words.given import given_path
from kimi_k3.words.weights import Requantisation, ScaleRule, Weights

PREFIX = "KIMI_K3_"
STATE_DIR = PREFIX + "STATE_DIR"
START_ID = PREFIX + "START_ID"
WEIGHTS = PREFIX + "WEIGHTS"
SCALE_RULE = PREFIX + "SCALE_RULE"
NEGATIVE_SCALE = PREFIX + "NEGATIVE_SCALE"
ALLOW_NONFINITE = PREFIX + "ALLOW_NONFINITE"
ACCEPT_LOSSY = PREFIX + "ACCEPT_LOSSY"
ALLOW_UNTESTED_VLLM = PREFIX + "ALLOW_UNTESTED_VLLM"
API_KEY = PREFIX + "API_KEY"
SIDECAR_PREFIX = PREFIX + "SIDECAR_"
"""What follows is the sidecar's, which refuses the unknown ones itself."""

OF_OPERATORS = (ACCEPT_LOSSY, ALLOW_UNTESTED_VLLM, API_KEY, STATE_DIR)
"""What an operator may set for ``kimi-k3 serve``."""

OF_THE_SUPERVISOR = {
    WEIGHTS: "use --weights",
    SCALE_RULE: "use --scale-rule",
    NEGATIVE_SCALE: "use --negative-scale or --no-negative-scale",
    ALLOW_NONFINITE: "use --allow-nonfinite",
    START_ID: "unset it: every start gets a new one",
}
"""What the supervisor sets for the engine's processes, and what an operator does instead."""

_SERVICE_LINK = re.compile(
    r"(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)"
)
_SERVICE_LINK_URL = re.compile(r"(tcp|udp|sctp)://")


def _flag(value: object) -> object:
    """Only ``1`` and ``0``: consent must not hang on whether ``yes``, ``on`` or ``y`` counts."""
    if isinstance(value, bool):
        return value
    if value in ("1", "0"):
        return value == "1"
    raise ValueError("must be 1 or 0")


class EngineEnvironment(BaseSettings):
    """What one of the engine's processes is told by the supervisor (or by an operator without one).

    Without a supervisor there is no journal: ``state_dir`` and ``start_id`` are ``None``.
    """

    model_config = SettingsConfigDict(env_prefix=PREFIX, extra="ignore", frozen=True, env_ignore_empty=True)

    state_dir: Path | None = None
    start_id: str | None = Field(default=None, min_length=1)
    weights: Weights | None = None
    scale_rule: ScaleRule = ScaleRule.MSE
    negative_scale: Annotated[bool, BeforeValidator(_flag)] = True
    allow_nonfinite: Annotated[bool, BeforeValidator(_flag)] = False
    accept_lossy: Annotated[bool, BeforeValidator(_flag)] = False
    allow_untested_vllm: Annotated[bool, BeforeValidator(_flag)] = False

    @property
    def requantisation(self) -> Requantisation:
        """How the experts become int4, if they do."""
        return Requantisation(
            rule=self.scale_rule,
            negative_scale=self.negative_scale and self.scale_rule is ScaleRule.MSE,
            allow_nonfinite=self.allow_nonfinite,
        )

    @classmethod
    def read(cls) -> EngineEnvironment:
        """Read and check the process's environment.

        Raises:
            OperatorError: a variable has a value that is not understood; names it.
        """
        try:
            return cls()
        except ValidationError as error:
            raise misunderstood(PREFIX, error) from None


def misunderstood(prefix: str, error: ValidationError) -> OperatorError:
    """The error for the first variable below ``prefix`` whose value pydantic refused."""
    first = error.errors(include_url=False)[0]
    name = prefix + str(first["loc"][0]).upper()
    why = first["msg"].removeprefix("Value error, ")
    return OperatorError(
        f"environment variable {name}={os.environ.get(name, '')!r}: {why}",
        remedy="correct or unset it",
        exit_code=ExitCode.USAGE,
    )


def check_operators_environment(environment: Mapping[str, str]) -> None:
    """Nothing that an operator set for ``kimi-k3 serve`` is left without effect, silently.

    An empty variable is as if it were not set. Variables of the sidecar and those that Kubernetes makes
    of a Service are none of our business. The engine's processes do get the supervisor's variables: this
    is for the command only.

    Raises:
        OperatorError: a variable with our prefix is not known, or is the supervisor's to set.
    """
    for name, value in sorted(environment.items()):
        spelled = name.upper()
        if not value or not spelled.startswith(PREFIX) or spelled.startswith(SIDECAR_PREFIX):
            continue
        if name in OF_OPERATORS or is_service_link(PREFIX, name, value):
            continue
        if name in OF_THE_SUPERVISOR:
            what, remedy = "is set by `kimi-k3 serve` itself", OF_THE_SUPERVISOR[name]
        else:
            what, remedy = "is not known", _nearest(spelled)
        raise OperatorError(f"environment variable {name} {what}", remedy=remedy, exit_code=ExitCode.USAGE)


def is_service_link(prefix: str, name: str, value: str) -> bool:
    """Whether Kubernetes made a variable of a Service, for every pod of its namespace.

    Args:
        prefix: ``KIMI_K3_`` for Services called ``kimi-k3`` or ``kimi-k3-...``.
    """
    if not name.startswith(prefix):
        return False
    if _SERVICE_LINK.fullmatch(name.removeprefix(prefix)):
        return True
    return name.endswith("PORT") and _SERVICE_LINK_URL.match(value) is not None


def _nearest(name: str) -> str:
    """A hint by what follows the prefix, which alone would make any two names alike."""
    known = [each.removeprefix(PREFIX) for each in (*OF_OPERATORS, *OF_THE_SUPERVISOR)]
    close = [PREFIX + each for each in difflib.get_close_matches(name.removeprefix(PREFIX), known, n=1)]
    if not close:
        return f"use one of {', '.join(OF_OPERATORS)}, or a flag (see 'kimi-k3 serve --help')"
    return OF_THE_SUPERVISOR.get(close[0], f"did you mean {close[0]!r}?")


def default_state_dir() -> Path:
    """``$KIMI_K3_STATE_DIR``, else ``$XDG_STATE_HOME/kimi-k3``, else ``~/.local/state/kimi-k3``.

    Raises:
        OperatorError: none of them is known, e.g. a container's user without a home; or the one that
            is known cannot be a path of ours.
    """
    named = os.environ.get(STATE_DIR)
    if named:
        return given_path(f"environment variable {STATE_DIR}", named, absolute=True)
    home = os.environ.get("XDG_STATE_HOME")
    if home:
        return given_path("environment variable XDG_STATE_HOME", home, absolute=True) / "kimi-k3"
    try:
        return given_path("home directory", str(Path.home())) / ".local" / "state" / "kimi-k3"
    except RuntimeError:
        raise OperatorError(
            f"user {os.getuid()} has no home directory to keep the state directory in",
            remedy=f"set {STATE_DIR}",
            exit_code=ExitCode.STATE,
        ) from None
