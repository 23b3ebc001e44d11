# SPDX-License-Identifier: Apache-2.0
"""MXFP4 -> int4_per_group_32: the mathematics, and what it costs."""

from kimi_k3.conversion.int4 import convert_experts_, dequantize_int4
from kimi_k3.conversion.loss import Loss
from kimi_k3.conversion.mxfp4 import GROUP_SIZE, NonFiniteScaleError, dequantize_mxfp4

__all__ = [
    "GROUP_SIZE",
    "Loss",
    "NonFiniteScaleError",
    "convert_experts_",
    "dequantize_int4",
    "dequantize_mxfp4",
]
