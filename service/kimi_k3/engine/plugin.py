# SPDX-License-Identifier: Apache-2.0
"""The entry point that vLLM calls in every one of its processes.

vLLM logs and swallows an exception that is raised while it *imports* a plugin, and then serves as
if the plugin were not there. So this module imports nothing that can fail; everything else happens
inside :func:`register`, whose exceptions reach the process. Should the module still not be loaded
(``VLLM_PLUGINS`` names others, a broken installation), no rank reports and the supervisor refuses
to call the start ready.
"""

from __future__ import annotations


def register() -> None:
    """Prepare this process to run Kimi-K3; do nothing on platforms that are not ours.

    Raises:
        SystemExit: this process must not go on; the reason is in the journal and on stderr.
            An exception would only end some of vLLM's processes, with the reason buried in the log.
    """
    from kimi_k3.engine.voice import reported
    from kimi_k3.errors import OperatorError

    try:
        with reported():
            _register()
    except OperatorError as error:
        raise SystemExit(int(error.exit_code)) from None


def _register() -> None:
    from vllm.platforms import current_platform

    from kimi_k3.errors import OperatorError
    from kimi_k3.words.environment import EngineEnvironment

    environment = EngineEnvironment.read()
    if current_platform.is_cpu():
        from kimi_k3.engine.cpu.registration import register_cpu

        register_cpu()
    elif environment.start_id is not None:
        raise OperatorError(
            f"engine plugin: platform {current_platform.device_name!r} is not supported yet, only cpu is",
            remedy="start on a CPU, or wait for the release that has run on gfx942",
        )
