# SPDX-License-Identifier: Apache-2.0
"""The entry point that vLLM calls in every one of its processes.

vLLM logs and swallows an exception that is raised while it *imports* a plugin, and then serves as
if the plugin were not there. So this module imports nothing that can fail; everything else happens
inside :func:`register`, whose exceptions reach the process. Should the module still not be loaded
(``VLLM_PLUGINS`` names others, a broken installation), no rank reports and the supervisor refuses
to call the start ready.
"""

from __future__ import annotations

import os


def register() -> None:
    """Prepare this process to run Kimi-K3; on other platforms import and change nothing.

    Raises:
        SystemExit: this process must not go on; the reason is in the journal and on stderr.
            An exception would only end some of vLLM's processes, with the reason buried in the log.
    """
    platform = _platform()
    if platform is None and not _misplaced():
        return
    from kimi_k3.engine.voice import reported
    from kimi_k3.errors import OperatorError

    try:
        with reported():
            _register(platform)
    except OperatorError as error:
        raise SystemExit(int(error.exit_code)) from None


def _platform() -> str | None:
    """``cpu`` or ``gfx942``; ``None`` for what is not ours."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        return "cpu"
    if current_platform.is_rocm():
        from vllm.platforms.rocm import on_gfx942

        return "gfx942" if on_gfx942() else None
    return None


def _misplaced() -> bool:
    """Whether a supervised start counts on the plugin: not on gfx950, where vLLM serves MXFP4 by itself."""
    from vllm.platforms import current_platform

    native = current_platform.is_rocm() and os.environ.get("KIMI_K3_WEIGHTS") == "mxfp4"
    return bool(os.environ.get("KIMI_K3_START_ID")) and not native


def _register(platform: str | None) -> None:
    from kimi_k3.errors import OperatorError
    from kimi_k3.words.environment import EngineEnvironment

    EngineEnvironment.read()
    if platform == "cpu":
        from kimi_k3.engine.cpu.registration import register_cpu

        register_cpu()
    elif platform == "gfx942":
        from kimi_k3.engine.gfx942.registration import register_gfx942

        register_gfx942()
    else:
        from vllm.platforms import current_platform

        raise OperatorError(
            f"engine plugin: int4 is served on gfx942 and on CPUs, this is {current_platform.device_name!r}",
            remedy="start on MI325X or MI300X, or use the profile for this machine",
        )
