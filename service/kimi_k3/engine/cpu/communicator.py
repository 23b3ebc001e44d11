# SPDX-License-Identifier: Apache-2.0
"""Gathering and scattering tokens among data-parallel ranks on CPUs.

vLLM's communicator of CPUs has an all-to-all manager for experts, which calls these two methods, but not the
methods themselves (0.32.0 and 0.33.0). Plain and slow: gloo wants parts of one size, so they are padded.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import pad


def all_gatherv(
    self: Any, input_: torch.Tensor | list[torch.Tensor], dim: int = 0, sizes: list[int] | None = None
) -> torch.Tensor | list[torch.Tensor]:
    """The rows of all ranks, one rank's after the other's.

    Args:
        self: the communicator.
        input_: this rank's rows, or several tensors of them.
        dim: only 0.
        sizes: rows of each rank; ``None`` if they are the same everywhere.

    Raises:
        ValueError: ``dim`` is not 0.
    """
    if dim != 0:
        raise ValueError(f"only rows are gathered here, not dimension {dim}")
    if isinstance(input_, list):
        return [_gathered(self, tensor, sizes) for tensor in input_]
    return _gathered(self, input_, sizes)


def reduce_scatterv(
    self: Any, input_: torch.Tensor, dim: int = -1, sizes: list[int] | None = None
) -> torch.Tensor:
    """This rank's rows of the sum over all ranks.

    Args:
        self: the communicator.
        input_: rows of all ranks, as :func:`all_gatherv` gives them.
        dim: only 0.
        sizes: rows of each rank; ``None`` if they are the same everywhere.

    Raises:
        ValueError: ``dim`` is not 0.
    """
    if dim != 0:
        raise ValueError(f"only rows are scattered here, not dimension {dim}")
    total = input_.contiguous().clone()
    dist.all_reduce(total, group=self.device_group)
    rows = sizes or [total.shape[0] // self.world_size] * self.world_size
    own: torch.Tensor = total.split(rows)[self.rank_in_group]
    return own.contiguous()


def _gathered(communicator: Any, tensor: torch.Tensor, sizes: list[int] | None) -> torch.Tensor:
    rows = sizes or [tensor.shape[0]] * communicator.world_size
    most = max(rows)
    missing = most - tensor.shape[0]
    own = pad(tensor, (0, 0) * (tensor.dim() - 1) + (0, missing)).contiguous() if missing else tensor
    parts = [torch.empty_like(own) for _ in rows]
    dist.all_gather(parts, own.contiguous(), group=communicator.device_group)
    return torch.cat([part[:size] for part, size in zip(parts, rows, strict=True)])
