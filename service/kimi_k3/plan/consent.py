# SPDX-License-Identifier: Apache-2.0
"""Lossy weights only with the operator's explicit consent."""

from __future__ import annotations

from kimi_k3.errors import ExitCode, OperatorError
from kimi_k3.words.weights import ConsentSource, Requantisation, ScaleRule, Weights

GAUSSIAN_RELATIVE_MSE = {ScaleRule.MSE: 0.004, ScaleRule.AMAX: 0.011}
"""Relative mean squared error of MXFP4 values requantised to int4 with one bf16 scale per 32, for
Gaussian weights. A figure to decide by; a checkpoint's own figures are measured while converting."""


def require_consent(
    requantisation: Requantisation | None, *, flag: bool, environment: bool
) -> ConsentSource | None:
    """Where the consent to a requantisation came from, or ``None`` when none is needed.

    Raises:
        OperatorError: the weights are lossy and nobody consented; says what is lost and how much.
    """
    if requantisation is None:
        return None
    if flag:
        return ConsentSource.FLAG
    if environment:
        return ConsentSource.ENVIRONMENT
    scale_rule = requantisation.rule
    raise OperatorError(
        f"--weights {Weights.INT4} is lossy and needs your consent: the routed experts' MXFP4 weights are "
        "requantised to int4 with one bf16 scale per 32 weights, which changes them by a relative mean "
        f"squared error of about {GAUSSIAN_RELATIVE_MSE[scale_rule]:.3f} with --scale-rule {scale_rule} "
        f"({_other(scale_rule)}; for Gaussian weights, the checkpoint's own figures stand on /conversion "
        "once it is converted)",
        remedy=f"add {ConsentSource.FLAG} (or set {ConsentSource.ENVIRONMENT}=1) to accept that, or use "
        f"--weights {Weights.MXFP4}, which is lossless and slower on gfx942",
        exit_code=ExitCode.CONSENT,
    )


def _other(rule: ScaleRule) -> str:
    return ", ".join(
        f"{other} {figure:.3f}" for other, figure in GAUSSIAN_RELATIVE_MSE.items() if other is not rule
    )
