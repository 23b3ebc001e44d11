# SPDX-License-Identifier: Apache-2.0
"""Back-end selection: which kernels compute int4 experts here, and whether they are right."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from vllm.model_executor.layers.fused_moe import FusedMoEConfig
from vllm.platforms import current_platform

from kimi_k3.engine.backend import Int4Backend, kernel
from kimi_k3.engine.proof import TOKENS, TOLERANCE, Proof, Situ, Size, prove
from kimi_k3.engine.voice import say
from kimi_k3.errors import OperatorError
from kimi_k3.words.weights import Requantisation


def choose_backend(moe: FusedMoEConfig) -> Int4Backend:
    """The back end for int4 experts on this platform.

    Raises:
        OperatorError: there is none, and why.
    """
    if current_platform.is_cpu():
        from kimi_k3.engine.cpu.backend import CPU_INT4

        return CPU_INT4
    from kimi_k3.engine.gfx942.backend import aiter_backend

    return aiter_backend(moe)


def missing_for_int4(moe: FusedMoEConfig) -> str | None:
    """What :func:`choose_backend` would refuse for, if int4 were asked for; ``None`` if nothing."""
    if current_platform.is_cpu():
        return None
    from kimi_k3.engine.gfx942.backend import lack

    found = lack(moe)
    return None if found is None else f"{found.why}; {found.remedy}"


@dataclass(frozen=True)
class Proved:
    """What may be served.

    Attributes:
        requantisation: as asked for, or without negative scales.
        proof: what the kernel answered.
    """

    requantisation: Requantisation
    proof: Proof


def prove_backend(backend: Int4Backend, moe: FusedMoEConfig, requantisation: Requantisation) -> Proved:
    """Ask the kernel before 20 minutes of loading; once per process and shape.

    Raises:
        OperatorError: it answers wrongly, and not only for negative scales.
    """
    beta, linear_beta = moe.activation_situ_beta, moe.activation_situ_linear_beta
    if beta is None or linear_beta is None:
        raise OperatorError(
            "the checkpoint names no bounds for SiTU (beta, linear beta)", remedy="serve a Kimi-K3 checkpoint"
        )
    proof = _proof(backend, moe, Situ(beta, linear_beta), signs=requantisation.negative_scale)
    if not proof.right:
        raise OperatorError(
            f"canary: {backend.name} answers wrongly: relative error {proof.error:.3g}, of which at most "
            f"{TOLERANCE} is rounding{_looks_like(proof)}",
            remedy="do not serve with this build of the kernels; use another (0.1.23 or later on gfx942), or "
            "--weights mxfp4",
        )
    if requantisation.negative_scale and not proof.right_with_signs:
        say(
            f"warning: canary: {backend.name} answers wrongly for negative scales (relative error "
            f"{proof.signed_error:.3g}){_looks_like(proof)}; converting without them, which loses a little "
            "more"
        )
        requantisation = requantisation.model_copy(update={"negative_scale": False})
    return Proved(requantisation, proof)


def _looks_like(proof: Proof) -> str:
    return f": {proof.likeness}" if proof.likeness else ""


_proofs: dict[tuple[str, Size, Situ, bool], Proof] = {}
"""A process has one GPU, and all its layers have one size."""


def _proof(backend: Int4Backend, moe: FusedMoEConfig, situ: Situ, *, signs: bool) -> Proof:
    size = Size(
        hidden=moe.hidden_dim,
        intermediate=moe.intermediate_size_per_partition,
        experts=moe.num_local_experts,
        top_k=moe.experts_per_token,
    )
    key = backend.name, size, situ, signs
    if key not in _proofs:
        device = torch.device(moe.device)
        _proofs[key] = proof = prove(kernel(backend, moe), size, situ=situ, signs=signs, device=device)
        if device.type != "cpu":
            # Once: what the problem needed shall not lie in pieces between the weights.
            torch.accelerator.empty_cache()
        if proof.right:
            batches = ", ".join(map(str, TOKENS))
            say(
                f"canary: {backend.name} is right for batches of {batches} tokens "
                f"(largest relative error {proof.error:.3g})"
            )
    return _proofs[key]
