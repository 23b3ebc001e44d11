# SPDX-License-Identifier: Apache-2.0
"""vLLM warns about itself while it is imported; that is not ours to mend, and everything after it is."""

from __future__ import annotations

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import vllm.model_executor.model_loader
    import vllm.v1.worker.cpu_model_runner  # noqa: F401
