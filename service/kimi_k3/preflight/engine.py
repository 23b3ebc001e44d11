# SPDX-License-Identifier: Apache-2.0
"""vLLM and the engine plugin: installed and allowed, found out without importing them."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import metadata

from kimi_k3.errors import OperatorError

PLUGIN_GROUP = "vllm.general_plugins"
PLUGIN_NAME = "kimi_k3"
VLLM_PLUGINS = "VLLM_PLUGINS"


def check_plugin_visible() -> None:
    """The engine plugin is an entry point that vLLM will find.

    Raises:
        OperatorError: it is not; vLLM would then serve without converting and without reporting.
    """
    if not metadata.entry_points(group=PLUGIN_GROUP, name=PLUGIN_NAME):
        raise OperatorError(
            f"vLLM plugin {PLUGIN_NAME}: no installed distribution declares it in the group {PLUGIN_GROUP}",
            remedy="install kimi-k3-gfx942 with pip in the environment of vLLM",
        )


def check_plugin_allowed(environment: Mapping[str, str]) -> None:
    """``VLLM_PLUGINS``, a list of the only plugins that vLLM loads, names ours if it is set.

    Raises:
        OperatorError: it does not.
    """
    allowed = environment.get(VLLM_PLUGINS)
    if allowed is not None and PLUGIN_NAME not in allowed.split(","):
        raise OperatorError(
            f"environment variable {VLLM_PLUGINS}={allowed!r} keeps vLLM from loading plugin {PLUGIN_NAME}",
            remedy=f"add {PLUGIN_NAME} to it or unset it",
        )
