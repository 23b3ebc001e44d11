# SPDX-License-Identifier: Apache-2.0
"""vLLM and the engine plugin: installed and allowed, found out without importing them."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from kimi_k3.errors import OperatorError

PLUGIN_GROUP = "vllm.general_plugins"
PLUGIN_NAME = "kimi_k3"
VLLM_PLUGINS = "VLLM_PLUGINS"

IMPORTED = sys.stdlib_module_names - {"test", "this"} | {
    *("aiter", "datasets", "flydsl", "kimi_k3", "numpy", "pydantic", "safetensors"),
    *("torch", "transformers", "triton", "vllm"),
}
"""Modules that vLLM's processes import, and of which a file of the operator's may bear the name."""


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


def check_directory(directory: Path) -> None:
    """No file of the current directory is taken for a module of vLLM's.

    vLLM looks at the model's class in a process that it starts with ``python -m``
    (``model_executor/models/registry.py``), and that imports from the current directory first.

    Raises:
        OperatorError: there is one.
    """
    for name in sorted(IMPORTED):
        for found in (directory / f"{name}.py", directory / name / "__init__.py"):
            if found.is_file():
                raise OperatorError(
                    f"{found.relative_to(directory)} of the current directory would be imported by vLLM in "
                    f"place of the module {name}",
                    remedy="start in another directory, or rename it",
                )
