# SPDX-License-Identifier: Apache-2.0
"""A double of AITER's Python surface as vLLM 0.32.0 and 0.33.0 use it, computing on CPU tensors.

Names, signatures, layouts and refusals are those of ROCm/aiter between pull requests 5240 and 5439 (September
2026). ``DOUBLE_FAULT`` makes it wrong in one of the ways of ``fused_moe.FAULTS``.
"""

from __future__ import annotations

from enum import IntEnum

from aiter.utility import dtypes as dtypes


class ActivationType(IntEnum):
    """csrc/include/aiter_enum.h"""

    No = -1
    Silu = 0
    Gelu = 1
    Swiglu = 2
    Situv2 = 3


class QuantType(IntEnum):
    """csrc/include/aiter_enum.h"""

    No = 0
    per_Tensor = 1
    per_Token = 2
    per_1x32 = 3
    per_1x128 = 4
    per_128x128 = 5
    per_256x128 = 6
    per_1024x128 = 7
