# SPDX-License-Identifier: Apache-2.0
"""The conversion on a GPU: what surrounds the Triton kernel."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING

import torch

from kimi_k3.conversion import reference
from kimi_k3.conversion.candidates import GROUP_SIZE
from kimi_k3.conversion.kernel import FLAG_BITS, ROW_MASK, convert_parts
from kimi_k3.conversion.kernel_groups import BIT_MASKS
from kimi_k3.conversion.kernel_tables import choice_rows, errors_of, kernel_tables, largest_errors
from kimi_k3.conversion.layout import STRIP_ROWS, WORDS_PER_GROUP, check_shape
from kimi_k3.conversion.loss import Tally, joined
from kimi_k3.conversion.nonfinite import NonFiniteGroupError, require_finite
from kimi_k3.words.weights import Int4Layout

if TYPE_CHECKING:
    from collections.abc import Callable

    from kimi_k3.conversion.candidates import Rule

_ANY_NUMBER = (1 << FLAG_BITS) - 1
_PAIRS_AT_ONCE = 8
_THREADS_PER_PAIR = 32
#: Enough for a program's beginning and end to cost little.
_CHUNKS_WANTED = 8
#: A thread counts its groups in 8 bits.
_CHUNKS_MOST = 255
_KEPT_WORDS_MOST = 64
#: On NVIDIA, registers of a thread in place: three programs at a time on a multiprocessor instead of two.
_REGISTERS_IN_PLACE = 80


@dataclass(frozen=True)
class Shape:
    """How a matrix is divided among programs; see :func:`kernel.convert_parts`."""

    strips: int
    pairs: int
    rounds: int
    row_chunks: int

    @classmethod
    def of(cls, rows: int, groups: int) -> Shape:
        """The division for experts of ``rows`` (a multiple of 16) by ``groups`` (even)."""
        pairs = _power_of_two(groups // 2, _PAIRS_AT_ONCE)
        strips = _power_of_two(rows // STRIP_ROWS, _PAIRS_AT_ONCE // pairs)
        row_chunks = groups // (2 * pairs)
        rounds = _power_of_two(rows // (STRIP_ROWS * strips), max(1, _CHUNKS_WANTED // row_chunks))
        return cls(strips=strips, pairs=pairs, rounds=rounds, row_chunks=row_chunks)

    @property
    def rows(self) -> int:
        """Rows of a part."""
        return STRIP_ROWS * self.strips * self.rounds

    @property
    def kept_words(self) -> int:
        """Words of a thread that stay in registers between loads and stores, in place."""
        return WORDS_PER_GROUP * self.rounds * self.row_chunks

    def warps(self, lanes: int) -> int:
        """Warps of a program on a GPU with so many lanes in one."""
        return max(1, self.strips * self.pairs * _THREADS_PER_PAIR // lanes)

    @property
    def fits_flags(self) -> bool:
        """Whether a thread's counts fit the bits that the kernel has for them."""
        return self.rounds * self.row_chunks <= _CHUNKS_MOST

    @property
    def fits_registers(self) -> bool:
        """Whether a conversion in place can keep a part's words in registers."""
        return self.kept_words <= _KEPT_WORDS_MOST


def _power_of_two(number: int, most: int) -> int:
    """The largest power of two that divides ``number`` and is at most ``most``."""
    return min(number & -number, 1 << (most.bit_length() - 1))


@cache
def _device_tables(rule: Rule, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.from_numpy(choice_rows(rule)).to(device), torch.from_numpy(largest_errors(rule)).to(device)


@dataclass(frozen=True)
class Launch:
    """A conversion whose first pass the device may still be at; see :func:`launch`.

    Attributes:
        scales: bf16, in the layout's shape.
        flags: ``[parts]`` int64, as the kernel writes them.
        square: ``[parts]`` float64.
        energy: ``[parts]`` float64.
        error: ``[parts]`` int32.
        run: starts the kernel; given the parts, on those that hold unusual groups, and how many non-finite
            groups of each are allowed.
    """

    scales: torch.Tensor
    flags: torch.Tensor
    square: torch.Tensor
    energy: torch.Tensor
    error: torch.Tensor
    run: Callable[[torch.Tensor | None, int], None]


def launch(
    packed: torch.Tensor, e8m0: torch.Tensor, out: torch.Tensor, rule: Rule, layout: Int4Layout
) -> Launch:
    """Start the first pass, which converts all parts without unusual groups. Does not wait for the device.

    Args:
        packed: ``[E, N, K / 2]`` uint8, MXFP4; N a multiple of 16, K of 64.
        e8m0: ``[E, N, K / 32]`` uint8.
        out: as ``packed``, or ``packed`` itself.
        rule: how scales are chosen.
        layout: of the result.
    """
    experts, rows, groups = e8m0.shape
    shape = Shape.of(rows, groups)
    parts = experts * rows // shape.rows
    device = packed.device
    bits = torch.empty(e8m0.shape, dtype=torch.uint16, device=device)
    flags = torch.empty(parts, dtype=torch.int64, device=device)
    square = torch.empty(parts, dtype=torch.float64, device=device)
    energy = torch.empty_like(square)
    error = torch.empty(parts, dtype=torch.int32, device=device)
    choices, errors = _device_tables(rule, device)
    in_place = out.data_ptr() == packed.data_ptr()
    amd = torch.version.hip is not None
    kernel = partial(
        convert_parts.run,
        packed.view(torch.int32), e8m0, out.view(torch.int32), bits, choices, errors,
        flags, square, energy, error, rows=rows,
        **{f"mask_{number}": mask for number, mask in enumerate(BIT_MASKS)},
        fifteen=ROW_MASK,
        TABLES=kernel_tables(rule), GROUPS=groups,
        STRIPS=shape.strips, PAIRS=shape.pairs, ROUNDS=shape.rounds,
        AITER=layout is Int4Layout.AITER, IN_PLACE=in_place, PTX=packed.is_cuda and not amd,
        warmup=False, num_warps=shape.warps(64 if amd else 32), enable_fp_fusion=True,
        **({"maxnreg": _REGISTERS_IN_PLACE} if in_place and not amd else {}),
    )  # fmt: skip

    def run(unusual: torch.Tensor | None, allowed: int) -> None:
        count = parts if unusual is None else len(unusual)
        kernel(unusual_parts=unusual, allowed=allowed, ORDINARY=unusual is None, grid=(count, 1, 1))

    run(None, 0)
    if layout is Int4Layout.AITER:
        bits = bits.view(experts, groups // 2, rows, 2)
    return Launch(bits.view(torch.bfloat16), flags, square, energy, error, run)


def convert(
    packed: torch.Tensor,
    e8m0: torch.Tensor,
    rule: Rule,
    layout: Int4Layout,
    *,
    out: torch.Tensor | None = None,
    allow_nonfinite: bool = False,
) -> tuple[torch.Tensor, Tally]:
    """Convert experts on a GPU, in place unless ``out`` is given.

    Args:
        packed: ``[E, N, K / 2]`` uint8, contiguous, MXFP4.
        e8m0: ``[E, N, K / 32]`` uint8, contiguous.
        rule: how scales are chosen.
        layout: of the result.
        out: receives the nibbles, as ``packed``.
        allow_nonfinite: whether groups with NaN or infinite values get AITER's scales and levels of 0.

    Returns:
        The scales, bf16 in the layout's shape, and what was counted.

    Raises:
        ValueError: the layout cannot hold the shape, or the tensors do not belong together.
        NonFiniteGroupError: names the first such group. Other groups may have been converted.
    """
    _check(packed, e8m0, out)
    experts, rows, groups = e8m0.shape
    check_shape(layout, rows, groups)
    if rows % STRIP_ROWS or groups % 2 or not Shape.of(rows, groups).fits_flags:
        # No published shape is such.
        return _convert_slowly(packed, e8m0, rule, layout, out, allow_nonfinite)
    if (out is None or out.data_ptr() == packed.data_ptr()) and not Shape.of(rows, groups).fits_registers:
        return _convert_by_expert(packed, e8m0, rule, layout, allow_nonfinite)
    launched = launch(packed, e8m0, packed if out is None else out, rule, layout)
    unusual = (_count_of(launched.flags, 2) > 0).nonzero().flatten()
    if len(unusual):
        launched.run(unusual, _ANY_NUMBER if allow_nonfinite else 0)
        if not allow_nonfinite:
            _require_finite_parts(packed, e8m0, _count_of(launched.flags, 2))
    return launched.scales, _tally(launched, experts, rows * groups)


def _check(packed: torch.Tensor, e8m0: torch.Tensor, out: torch.Tensor | None) -> None:
    tensors = [packed, e8m0] + ([] if out is None else [out])
    if any(tensor.dtype is not torch.uint8 or not tensor.is_contiguous() for tensor in tensors):
        raise ValueError("weights and scales must be contiguous uint8 tensors")
    shape = (*e8m0.shape[:-1], e8m0.shape[-1] * GROUP_SIZE // 2)
    if e8m0.dim() != 3 or any(weights.shape != shape for weights in [packed, *tensors[2:]]):
        raise ValueError(f"weights {tuple(packed.shape)} do not belong to scales {tuple(e8m0.shape)}")


def _count_of(flags: torch.Tensor, number: int) -> torch.Tensor:
    return (flags >> (FLAG_BITS * number)) & _ANY_NUMBER


def _require_finite_parts(packed: torch.Tensor, e8m0: torch.Tensor, nonfinite: torch.Tensor) -> None:
    """Raise for the first part that holds non-finite groups; its weights are as they were."""
    bad = nonfinite.nonzero().flatten()
    if len(bad) == 0:
        return
    experts, rows, _ = e8m0.shape
    part_rows = experts * rows // len(nonfinite)
    expert, row = divmod(int(bad[0]) * part_rows, rows)
    part = (slice(expert, expert + 1), slice(row, row + part_rows))
    require_finite(packed[part].cpu().numpy(), e8m0[part].cpu().numpy(), first_expert=expert, first_row=row)


def _tally(launched: Launch, experts: int, groups: int) -> Tally:
    lossless, zero, nonfinite, clamped = (
        _count_of(launched.flags, number).view(experts, -1).cpu().numpy() for number in range(4)
    )
    return Tally(
        groups_per_expert=groups,
        lossless=lossless,
        zero=zero,
        nonfinite=nonfinite,
        clamped=clamped,
        squared_error=launched.square.view(experts, -1).cpu().numpy(),
        energy=launched.energy.view(experts, -1).cpu().numpy(),
        max_error=errors_of(launched.error.view(experts, -1).cpu().numpy()),
    )


def _convert_slowly(
    packed: torch.Tensor,
    e8m0: torch.Tensor,
    rule: Rule,
    layout: Int4Layout,
    out: torch.Tensor | None,
    allow_nonfinite: bool,
) -> tuple[torch.Tensor, Tally]:
    if not allow_nonfinite:
        require_finite(packed.cpu().numpy(), e8m0.cpu().numpy())
    nibbles, scales, tally = reference.convert(packed, e8m0, rule, layout)
    (packed if out is None else out).copy_(nibbles)
    return scales, tally


def _convert_by_expert(
    packed: torch.Tensor, e8m0: torch.Tensor, rule: Rule, layout: Int4Layout, allow_nonfinite: bool
) -> tuple[torch.Tensor, Tally]:
    """In place by way of one expert's work space, for rows too long for registers."""
    work = torch.empty_like(packed[:1])
    done = []
    for expert in range(len(packed)):
        one = (packed[expert : expert + 1], e8m0[expert : expert + 1])
        try:
            done.append(convert(*one, rule, layout, out=work, allow_nonfinite=allow_nonfinite))
        except NonFiniteGroupError as error:
            raise NonFiniteGroupError(expert, error.row, error.group, error.e8m0) from None
        one[0].copy_(work)
    return torch.cat([scales for scales, _ in done]), joined([tally for _, tally in done])
