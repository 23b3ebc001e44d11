# SPDX-License-Identifier: Apache-2.0
"""Back-end selection: which kernels compute int4 experts here, and whether they are right."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from vllm.model_executor.layers.fused_moe import FusedMoEConfig
from vllm.model_executor.layers.fused_moe.oracle.mxfp4 import Mxfp4MoeBackend, _validate_mxfp4_experts_config
from vllm.platforms import current_platform

from kimi_k3.conversion.candidates import rule_of
from kimi_k3.conversion.experts import convert_experts_
from kimi_k3.engine.backend import Int4Backend, kernel
from kimi_k3.engine.conversion_proof import difference
from kimi_k3.engine.proof import PREFILL, TOKENS, TOLERANCE, Proof, Situ, Size, prove
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


UNSUPPORTED = "use the parallelism of one of the profiles (kimi-k3 plan --help)"


def require_support(experts_class: type[Any], moe: FusedMoEConfig, backend: Mxfp4MoeBackend) -> None:
    """Ask vLLM before 20 minutes of loading what it asks when it builds the kernel after them.

    Raises:
        OperatorError: the class cannot serve this deployment.
    """
    try:
        _validate_mxfp4_experts_config(experts_class, moe, backend)
    except ValueError as error:
        raise OperatorError(f"int4 experts: {error}", remedy=UNSUPPORTED) from error


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
    _require_conversion(backend, moe, requantisation)
    if requantisation.negative_scale and not proof.right_with_signs:
        say(
            f"warning: canary: {backend.name} answers wrongly for negative scales (relative error "
            f"{proof.signed_error:.3g}){_looks_like(proof)}; converting without them, which loses a little "
            "more"
        )
        requantisation = requantisation.model_copy(update={"negative_scale": False})
    return Proved(requantisation, proof)


_converts: set[tuple[str, Requantisation]] = set()


def _require_conversion(backend: Int4Backend, moe: FusedMoEConfig, requantisation: Requantisation) -> None:
    """On a GPU the conversion does what its reference does; once per process.

    Raises:
        OperatorError: it does not.
    """
    device = torch.device(moe.device)
    key = backend.name, requantisation
    if device.type == "cpu" or key in _converts:
        return
    widths = moe.hidden_dim, moe.intermediate_size_per_partition
    wrong = difference(convert_experts_, rule_of(requantisation), backend.layout, widths, device)
    if wrong is not None:
        raise OperatorError(
            f"conversion: on {device} it is not bit-identical to its reference: {wrong}",
            remedy="report this with the GPU, ROCm and Triton versions; --weights mxfp4 needs no conversion",
        )
    say("conversion: bit-identical to its reference on this device")
    _converts.add(key)


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
        batches = TOKENS if device.type == "cpu" else (*TOKENS, PREFILL)
        say(f"canary: asking {backend.name}, whose kernels may have to be compiled first")
        try:
            computed = kernel(backend, moe)
            proof = prove(computed, size, situ=situ, signs=signs, device=device, batches=batches)
        except Exception as error:  # whatever AITER, its compiler or the device raises
            raise OperatorError(
                f"canary: {backend.name} cannot compute a layer of {size}: {type(error).__name__}: {error}",
                remedy="use another build of the kernels (0.1.23 or later on gfx942), or --weights mxfp4",
            ) from error
        _proofs[key] = proof
        if device.type != "cpu":
            # Once: what the problem needed shall not lie in pieces between the weights.
            torch.accelerator.empty_cache()
        if proof.right:
            say(
                f"canary: {backend.name} is right for batches of {', '.join(map(str, batches))} tokens "
                f"(largest relative error {proof.error:.3g})"
            )
    return _proofs[key]
