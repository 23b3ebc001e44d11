# SPDX-License-Identifier: Apache-2.0
"""Profiles that say more than one start can be told yet. Pure."""

from __future__ import annotations

from kimi_k3.errors import ExitCode, OperatorError
from kimi_k3.profiles.schema import Profile


def require_startable(profile: Profile) -> None:
    """A profile whose start needs nothing that an operator cannot give.

    Without this, a start would leave out what it cannot say, and serve something else or fail an hour later.

    Raises:
        OperatorError: it spans several nodes, needs a second checkpoint, or has ranks that the supervisor
            does not follow.
    """
    if profile.nodes == 1 and profile.ranks > profile.tensor_parallel_size:
        raise OperatorError(
            f"--profile {profile.name}: {profile.ranks} ranks on one node, and a start here follows those of "
            f"tensor parallelism, {profile.tensor_parallel_size}",
            remedy="leave pipeline and data parallelism at 1",
            exit_code=ExitCode.USAGE,
        )
    if profile.nodes > 1:
        raise OperatorError(
            f"--profile {profile.name}: spans {profile.nodes} nodes, and one start here is one node",
            remedy="take a profile for one node, e.g. --profile ep8",
            exit_code=ExitCode.USAGE,
        )
    if profile.needs_draft:
        raise OperatorError(
            f"--profile {profile.name}: needs a second checkpoint, a draft, which cannot be named yet",
            remedy="take a profile without speculative decoding, e.g. --profile ep8",
            exit_code=ExitCode.USAGE,
        )
