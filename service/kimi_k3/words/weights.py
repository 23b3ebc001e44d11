# SPDX-License-Identifier: Apache-2.0
"""What the experts are served as, and on whose word."""

from __future__ import annotations

from enum import StrEnum

from pydantic import BaseModel, ConfigDict


class Weights(StrEnum):
    """What the experts are served as."""

    MXFP4 = "mxfp4"
    INT4 = "int4"

    @property
    def lossy(self) -> bool:
        """Whether the served weights differ from the checkpoint's values."""
        return self is Weights.INT4


INT4_NAME = "int4_per_group_32"
"""vLLM's name for it (``QUANT_KEY_NAMES`` in vllm/config/quantization.py)."""


class ScaleRule(StrEnum):
    """How a group's int4 scale is chosen."""

    MSE = "mse"
    AMAX = "amax"

    @property
    def limit_relative_mse(self) -> float:
        """A relative squared error over a model that calls for somebody to look.

        More than weights with heavy tails lose (Student's t, three degrees of freedom: 0.0084 and 0.0171).
        Gaussian ones lose 0.0042 and 0.0106, trained ones of a small model 0.0048 and 0.0112, and ``mse``
        without negative scales up to a quarter more. So an ``mse`` that loses what ``amax`` does is above it.
        """
        return {ScaleRule.MSE: 0.01, ScaleRule.AMAX: 0.02}[self]


class Requantisation(BaseModel):
    """How MXFP4 becomes int4: all that, beside the checkpoint, decides the bits.

    Attributes:
        rule: how a group's scale is chosen.
        negative_scale: whether it may be negative; never with ``amax``.
        allow_nonfinite: whether groups with NaN or infinite values are converted, as AITER does (the scale
            keeps what they were), instead of stopping the conversion.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    rule: ScaleRule
    negative_scale: bool
    allow_nonfinite: bool

    def __str__(self) -> str:
        """In an operator's words."""
        signs = "" if self.negative_scale or self.rule is ScaleRule.AMAX else ", no negative scales"
        return f"scale rule {self.rule}{signs}{', non-finite groups allowed' if self.allow_nonfinite else ''}"


class Int4Layout(StrEnum):
    """Where the nibbles and scales of converted experts stand in memory."""

    PLAIN = "plain"
    AITER = "aiter"


class Projection(StrEnum):
    """A projection of a layer's routed experts."""

    W13 = "w13"
    W2 = "w2"


class ConsentSource(StrEnum):
    """Where the operator's consent to a lossy conversion came from."""

    FLAG = "--accept-lossy"
    ENVIRONMENT = "KIMI_K3_ACCEPT_LOSSY"
