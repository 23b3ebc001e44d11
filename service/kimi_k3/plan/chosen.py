# SPDX-License-Identifier: Apache-2.0
"""The profile that a command line names, with its ``--set`` in place: the same for every command."""

from __future__ import annotations

from kimi_k3.errors import ExitCode, OperatorError
from kimi_k3.plan.options import Options
from kimi_k3.plan.overrides import with_settings
from kimi_k3.profiles.load import load_profile, profile_names
from kimi_k3.profiles.schema import Profile


def chosen_profile(name: str, options: Options) -> Profile:
    """The profile ``name`` with ``options.settings``; what has an option of its own is left to ``decide``.

    Raises:
        OperatorError: there is no such profile, no such setting, or the profile cannot have it; or an
            option says the same thing, and one of the two would have no effect.
    """
    profile = load_profile(name)
    if not options.settings:
        return profile
    changed = with_settings(profile, options.settings, known_flags())
    for setting in options.settings:
        key = setting.partition("=")[0]
        if getattr(options, key.replace("-", "_"), None) is not None:
            raise OperatorError(
                f"--set {setting!r}: --{key} is given, too",
                remedy="leave one of them out",
                exit_code=ExitCode.USAGE,
            )
    return changed


def known_flags() -> set[str]:
    """The vLLM flags that any profile knows, which are those that an operator may set."""
    return {flag for each in profile_names() for flag in load_profile(each).flags}
