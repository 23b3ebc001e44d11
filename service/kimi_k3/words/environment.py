# SPDX-License-Identifier: Apache-2.0
"""The environment variables by which the supervisor, the engine plugin and the sidecar agree.

Each name is written here once; the engine's processes inherit them from the supervisor. An operator
may set ``KIMI_K3_STATE_DIR``, ``KIMI_K3_ACCEPT_LOSSY`` and ``KIMI_K3_API_KEY``; the others are set
by the supervisor for its child.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator, Field, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from kimi_k3.errors import ExitCode, OperatorError
from kimi_k3.words.weights import ScaleRule, Weights

PREFIX = "KIMI_K3_"
STATE_DIR = PREFIX + "STATE_DIR"
START_ID = PREFIX + "START_ID"
WEIGHTS = PREFIX + "WEIGHTS"
SCALE_RULE = PREFIX + "SCALE_RULE"
ACCEPT_LOSSY = PREFIX + "ACCEPT_LOSSY"
API_KEY = PREFIX + "API_KEY"


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
    accept_lossy: Annotated[bool, BeforeValidator(_flag)] = False

    @classmethod
    def read(cls) -> EngineEnvironment:
        """Read and check the process's environment.

        Raises:
            OperatorError: a variable has a value that is not understood; names it.
        """
        try:
            return cls()
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            name = PREFIX + str(first["loc"][0]).upper()
            raise OperatorError(
                f"environment variable {name}={os.environ.get(name, '')!r}: {first['msg']}",
                remedy="correct or unset it",
                exit_code=ExitCode.USAGE,
            ) from None


def default_state_dir() -> Path:
    """``$KIMI_K3_STATE_DIR``, else ``$XDG_STATE_HOME/kimi-k3``, else ``~/.local/state/kimi-k3``.

    Raises:
        OperatorError: none of them is known, e.g. a container's user without a home.
    """
    named = os.environ.get(STATE_DIR)
    if named:
        return Path(named)
    home = os.environ.get("XDG_STATE_HOME")
    if home:
        return Path(home) / "kimi-k3"
    try:
        return Path.home() / ".local" / "state" / "kimi-k3"
    except RuntimeError:
        raise OperatorError(
            f"user {os.getuid()} has no home directory to keep the state directory in",
            remedy=f"set {STATE_DIR}",
            exit_code=ExitCode.STATE,
        ) from None
