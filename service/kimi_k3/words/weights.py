# SPDX-License-Identifier: Apache-2.0
"""What the experts are served as, and on whose word."""

from __future__ import annotations

from enum import StrEnum


class Weights(StrEnum):
    """What the experts are served as."""

    MXFP4 = "mxfp4"
    INT4 = "int4"

    @property
    def lossy(self) -> bool:
        """Whether the served weights differ from the checkpoint's values."""
        return self is Weights.INT4


class ScaleRule(StrEnum):
    """How a group's int4 scale is chosen."""

    MSE = "mse"
    AMAX = "amax"


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
