# SPDX-License-Identifier: Apache-2.0
"""Telling vLLM on gfx942 about Kimi-K3, through its official hooks only."""

from __future__ import annotations


def register_gfx942() -> None:
    """Register quantisation and loader; the model classes are vLLM's own."""
    from kimi_k3.contract.facts import Use
    from kimi_k3.engine.contract import check_contract
    from kimi_k3.engine.registration import register_shared
    from kimi_k3.words.environment import EngineEnvironment

    if EngineEnvironment.read().start_id is not None:
        # Otherwise it may be for another model: then a layer of Kimi-K3 asks.
        check_contract(Use.GFX942)
    register_shared()
