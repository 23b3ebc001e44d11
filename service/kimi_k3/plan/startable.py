# SPDX-License-Identifier: Apache-2.0
"""Profiles that say more than one start can be told yet. Pure."""

from __future__ import annotations

from kimi_k3.errors import ExitCode, OperatorError
from kimi_k3.profiles.schema import Profile


def require_startable(profile: Profile) -> None:
    """A profile whose start needs nothing that an operator cannot give.

    Without this, a start would leave out what it cannot say, and serve something else or fail an hour later.

    Raises:
        OperatorError: it needs a second checkpoint.
    """
    if profile.not_startable is not None:
        raise OperatorError(
            f"--profile {profile.name}: {profile.not_startable}",
            remedy="take a profile of one checkpoint, e.g. --profile ep8",
            exit_code=ExitCode.USAGE,
        )
