# SPDX-License-Identifier: Apache-2.0
"""Enough CPU cores for the ranks that compute on them."""

from __future__ import annotations

from collections.abc import Collection

from kimi_k3.errors import ExitCode, OperatorError


def check_cores(cores: Collection[int], ranks: int) -> None:
    """At least one core per rank.

    Raises:
        OperatorError: there are fewer.
    """
    if len(cores) < ranks:
        raise OperatorError(
            f"--tensor-parallel-size {ranks}: on the CPU each rank needs a core of its own, and this process "
            f"may use {len(cores)}",
            remedy=f"give at most --tensor-parallel-size {len(cores)} or allow it more cores",
            exit_code=ExitCode.USAGE,
        )
