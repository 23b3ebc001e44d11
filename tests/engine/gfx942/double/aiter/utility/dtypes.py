# SPDX-License-Identifier: Apache-2.0
"""aiter/utility/dtypes.py. On a CPU torch cannot copy ``torch.int4``, which AITER takes if there is one."""

from __future__ import annotations

import torch

i4x2 = torch.int8
i8 = torch.int8
u8 = torch.uint8
fp4x2 = torch.float4_e2m1fn_x2
fp8_e8m0 = torch.float8_e8m0fnu
bf16 = torch.bfloat16
fp32 = torch.float32
