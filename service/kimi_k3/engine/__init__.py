# SPDX-License-Identifier: Apache-2.0
"""Everything that runs inside vLLM's processes.

vLLM finds :func:`kimi_k3.engine.plugin.register` through the ``vllm.general_plugins`` entry point
and calls it in each of its processes. Nothing here is imported by the rest of the product.
"""
