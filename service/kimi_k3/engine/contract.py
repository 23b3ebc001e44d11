# SPDX-License-Identifier: Apache-2.0
"""The vLLM of this very process against the recorded one, also where no preflight looked before."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import vllm

from kimi_k3.contract.compare import compare
from kimi_k3.contract.facts import Use
from kimi_k3.contract.record import supported
from kimi_k3.engine.voice import say
from kimi_k3.errors import OperatorError
from kimi_k3.words.environment import ALLOW_UNTESTED_VLLM, EngineEnvironment


@cache
def check_contract(*uses: Use) -> None:
    """Refuse a vLLM that the plugin was not written against; once per process.

    Raises:
        OperatorError: something that is built on is not there; or the version or a line is another one, and
            ``KIMI_K3_ALLOW_UNTESTED_VLLM`` is not 1.
    """
    package = Path(vllm.__file__).parent
    found = compare(package, vllm.__version__, uses)
    if found.as_recorded:
        return
    what = f"vLLM {vllm.__version__} in {package}: {found.difference()}"
    remedy = f"use the image, or install vLLM {supported('or')}"
    if found.missing:
        raise OperatorError(what, remedy=remedy)
    if not EngineEnvironment.read().allow_untested_vllm:
        raise OperatorError(what, remedy=f"{remedy}; {ALLOW_UNTESTED_VLLM}=1 starts it all the same")
    say(f"warning: {what}; {ALLOW_UNTESTED_VLLM}=1 allows it")
