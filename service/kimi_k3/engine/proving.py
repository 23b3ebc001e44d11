# SPDX-License-Identifier: Apache-2.0
"""Holds the int4 kernel that would serve on this machine against float32, batch by batch.

``python -m kimi_k3.engine.proving REQUEST`` prints a line of JSON behind a mark for each batch, as it comes,
among whatever vLLM prints. It is the comparison that every start makes of its own layers before it loads.
"""

from __future__ import annotations

import math
import sys

from pydantic import BaseModel

from kimi_k3.words.backends import Request
from kimi_k3.words.proving import MARK, Measured, Proven

BETA, LINEAR_BETA = 4.0, 25.0
"""Of SiTU, as the published config.json has them (activation_situ_beta and its linear one)."""


def main(argument: str) -> int:
    """Answer one request, given as JSON."""
    import torch
    import vllm
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.platforms import current_platform

    from kimi_k3.engine.backend import kernel
    from kimi_k3.engine.backends import architecture, layer
    from kimi_k3.engine.choice import choose_backend
    from kimi_k3.engine.proof import TOKENS, TOLERANCE, Situ, Size, make_problem, relative_error

    request = Request.model_validate_json(argument)
    with set_current_vllm_config(VllmConfig()):
        moe = layer(request)
        backend = choose_backend(moe)
        _tell(
            Proven(
                backend=backend.name,
                vllm=vllm.__version__,
                platform=current_platform.device_name,
                architecture=architecture(),
                tolerance=TOLERANCE,
                batches=TOKENS,
            )
        )
        computed = kernel(backend, moe)
        size = Size(request.hidden, request.intermediate, request.local_experts, request.top_k)
        for signed in (False, True):
            problem = make_problem(size, signed=signed, device=torch.device(moe.device), tokens=max(TOKENS))
            for count in TOKENS:
                part = problem.tokens(count)
                error = relative_error(computed(part), part.answer(Situ(BETA, LINEAR_BETA)))
                _tell(Measured(tokens=count, signed=signed, error=error if math.isfinite(error) else None))
    return 0


def _tell(answer: BaseModel) -> None:
    print(f"\n{MARK}{answer.model_dump_json()}", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
