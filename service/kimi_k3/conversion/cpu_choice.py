# SPDX-License-Identifier: Apache-2.0
"""The choice of scales on a core: straight code over eight groups at a time.

A group's 32 nibbles are four 32-bit words. Transposed bit by bit they are four *planes* of one word each,
three of the magnitudes and one of the signs. Logic on the planes tells where magnitude m stands; how often,
and how often with a minus, decides the scale. A rule's numbers are constants of the code, of which the terms
that are 0 are left out.

It is written for LLVM, in vectors, because LLVM's own vectorisation of the same code for one group needs a
fifth more instructions: it counts bits in whole words, and sorts words by permutations across a vector.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from kimi_k3.conversion.candidates import FOURFOLD_SQUARES, GROUP_SIZE

if TYPE_CHECKING:
    from kimi_k3.conversion.candidates import Rule

LANES = 8
"""Groups at a time: a vector of 256 bits; where there is none of that size, LLVM takes two or more."""

_WORD = ir.IntType(32)
_EVEN_BITS, _LOW_PAIRS, _BYTE_ONES = 0x55555555, 0x33333333, 0x01010101


class Choice(NamedTuple):
    """The code of a rule.

    Attributes:
        one: function of ``nibbles`` (uint32, four words to a group), ``keys`` (of ``key``), ``fourfold``
            (uint32) and the number of a group. Writes its key, ``squared error << shift | option``, with the
            option of an ordinary group, and four times its energy.
        eight: the same for so many groups, given the first.
        key: numpy's type of keys.
        shift: the bits of a key that hold the option.
    """

    one: Any
    eight: Any
    key: Any
    shift: int


@dataclass(frozen=True)
class _Numbers:
    """Whole numbers, one to a lane, to compute with as in Python; a plain number is the same in each."""

    builder: Any
    value: Any

    def _of(self, other: _Numbers | int) -> Any:
        if isinstance(other, _Numbers):
            return other.value
        kind = self.value.type
        return kind([other] * kind.count if isinstance(kind, ir.VectorType) else other)

    def _with(self, value: Any) -> _Numbers:
        return _Numbers(self.builder, value)

    def __and__(self, other: _Numbers | int) -> _Numbers:
        return self._with(self.builder.and_(self.value, self._of(other)))

    def __xor__(self, other: _Numbers | int) -> _Numbers:
        return self._with(self.builder.xor(self.value, self._of(other)))

    def __invert__(self) -> _Numbers:
        return self._with(self.builder.not_(self.value))

    def __lshift__(self, bits: int) -> _Numbers:
        return self._with(self.builder.shl(self.value, self._of(bits)))

    def __rshift__(self, bits: int) -> _Numbers:
        return self._with(self.builder.lshr(self.value, self._of(bits)))

    def __add__(self, other: _Numbers | int) -> _Numbers:
        return self._with(self.builder.add(self.value, self._of(other)))

    def __sub__(self, other: _Numbers | int) -> _Numbers:
        return self._with(self.builder.sub(self.value, self._of(other)))

    def __mul__(self, other: _Numbers | int) -> _Numbers:
        return self._with(self.builder.mul(self.value, self._of(other)))

    def where(self, comparison: str, other: _Numbers | int, better: _Numbers, worse: _Numbers) -> _Numbers:
        """``better`` in the lanes in which the unsigned comparison holds."""
        holds = self.builder.icmp_unsigned(comparison, self.value, self._of(other))
        return self._with(self.builder.select(holds, better.value, worse.value))

    def as_type(self, lane: Any) -> _Numbers:
        """In lanes of another width, at least as large."""
        kind = self.value.type
        wide = ir.VectorType(lane, kind.count) if isinstance(kind, ir.VectorType) else lane
        return self._with(self.builder.zext(self.value, wide) if wide != kind else self.value)

    def bits_set(self) -> _Numbers:
        """How many bits are set in each lane."""
        kind = self.value.type
        if not isinstance(kind, ir.VectorType):
            return self._with(self.builder.ctpop(self.value))
        # In bytes, whose sum is the highest byte of this product: of whole words LLVM would sum them by
        # instructions that take twice as many.
        octets = ir.VectorType(ir.IntType(8), 4 * kind.count)
        function = self.builder.module.declare_intrinsic(
            f"llvm.ctpop.v{octets.count}i8", (), ir.FunctionType(octets, (octets,))
        )
        counts = self.builder.call(function, [self.builder.bitcast(self.value, octets)])
        return self._with(self.builder.bitcast(counts, kind)) * _BYTE_ONES >> 24


def _swap(a: _Numbers, b: _Numbers, shift: int, mask: int) -> tuple[_Numbers, _Numbers]:
    changed = ((a >> shift) ^ b) & mask
    return a ^ (changed << shift), b ^ changed


def _transpose(a: _Numbers, b: _Numbers, c: _Numbers, d: _Numbers) -> tuple[_Numbers, ...]:
    """Bit i of each nibble of word j becomes bit j of that nibble of word i."""
    a, b = _swap(a, b, 1, _EVEN_BITS)
    c, d = _swap(c, d, 1, _EVEN_BITS)
    a, c = _swap(a, c, 2, _LOW_PAIRS)
    b, d = _swap(b, d, 2, _LOW_PAIRS)
    return a, b, c, d


def _masks(b0: _Numbers, b1: _Numbers, b2: _Numbers) -> list[_Numbers]:
    """Where the codes 1-7 stand."""
    return [
        b0 & ~b1 & ~b2,
        ~b0 & b1 & ~b2,
        b0 & b1 & ~b2,
        ~b0 & ~b1 & b2,
        b0 & ~b1 & b2,
        ~b0 & b1 & b2,
        b0 & b1 & b2,
    ]


def _weighted(counts: Sequence[_Numbers], weights: Sequence[int]) -> _Numbers | None:
    """The sum of the terms that are not 0."""
    total = None
    for count, weight in zip(counts, weights, strict=True):
        if weight:
            total = count * weight if total is None else total + count * weight
    return total


def choice(rule: Rule) -> Choice:
    """The code by which groups get their options under a rule."""
    options = [
        (number, rule.squares(one.candidate.short_errors), rule.squares(one.candidate.long_errors), one.sign)
        for number, one in enumerate(rule.options if rule.by_error else rule.options[:7])
        # The same errors with another sign would not win.
        if number % len(rule.signs) == 0 or one.candidate.short != one.candidate.long
    ]
    # Keys also hold the options that keep nothing.
    shift = (len(rule.options) + 3).bit_length()
    most = max(GROUP_SIZE * max(*short, *long) for _, short, long, _ in options) << shift
    assert most < 2**63
    key = types.uint32 if most < 2**31 else types.uint64
    lane = ir.IntType(key.bitwidth)

    def key_of(every: list[_Numbers], negative: dict[int, _Numbers]) -> _Numbers:
        least: _Numbers | None = None
        for option, short, long, sign in options:
            sided = [code for code in range(1, 8) if long[code] != short[code]]
            below = [negative[code] for code in sided]
            sides = below if sign > 0 else [every[code - 1] - negative[code] for code in sided]
            value = every[0] * 0 + option
            for part in (
                _weighted(every, [one << shift for one in short[1:]]),
                _weighted(sides, [long[code] - short[code] << shift for code in sided]),
            ):
                value = value if part is None else value + part
            if least is None:
                least = value
            elif rule.by_error:
                least = value.where("<", least, value, least)
            else:
                # The option of code k is number k - 1, and the last one that is there is the largest.
                least = every[option].where("!=", 0, value, least)
        assert least is not None
        return least

    def figures(words: list[_Numbers]) -> tuple[_Numbers, _Numbers]:
        b0, b1, b2, sign = _transpose(*words)
        masks = _masks(b0, b1, b2)
        every = [mask.bits_set() for mask in masks]
        negative = {code: (masks[code - 1] & sign).bits_set() for code in rule.sided_codes}
        energy = _weighted(every, FOURFOLD_SQUARES[1:])
        assert energy is not None
        wide = [one.as_type(lane) for one in every]
        return key_of(wide, {code: one.as_type(lane) for code, one in negative.items()}), energy

    return Choice(_over(figures, 1, key), _over(figures, LANES, key), getattr(np, key.name), shift)


def _over(figures: Any, lanes: int, key: Any) -> Any:
    """An instruction that loads groups, computes their figures and stores them."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        nibbles, keys, fourfold = (
            context.make_array(kind)(context, builder, value).data
            for kind, value in zip(signature.args[:3], arguments[:3], strict=True)
        )
        group = arguments[3]

        def place(array: Any, index: Any, kind: Any) -> Any:
            return builder.bitcast(builder.gep(array, [index]), kind.as_pointer())

        kind = _WORD if lanes == 1 else ir.VectorType(_WORD, lanes)
        rows = []
        for number in range(4):
            start = builder.add(builder.shl(group, group.type(2)), group.type(number * lanes))
            row = builder.load(place(nibbles, start, kind))
            row.align = 4
            rows.append(row)
        words = rows if lanes == 1 else _sorted(builder, rows)
        found = figures([_Numbers(builder, one) for one in words])
        for array, one in zip((keys, fourfold), found, strict=True):
            value = one.value if lanes == 1 else _shuffled(builder, one.value, one.value, _IN_ORDER)
            builder.store(value, place(array, group, value.type)).align = array.type.pointee.width // 8
        return context.get_dummy_value()

    def typed(_: Any, nibbles: Any, keys: Any, fourfold: Any, group: Any) -> Any:
        return types.void(nibbles, keys, fourfold, types.int64), generate

    return intrinsic(typed)


_LOW_WORDS, _HIGH_WORDS = (0, 8, 1, 9, 4, 12, 5, 13), (2, 10, 3, 11, 6, 14, 7, 15)
_LOW_HALVES, _HIGH_HALVES = (0, 1, 8, 9, 4, 5, 12, 13), (2, 3, 10, 11, 6, 7, 14, 15)
_IN_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)


def _sorted(builder: Any, rows: Sequence[Any]) -> list[Any]:
    """From four vectors of two groups each to one vector per word, whose groups are 0 2 4 6 1 3 5 7."""
    pairs = [
        [_shuffled(builder, rows[i], rows[i + 1], places) for i in (0, 2)]
        for places in (_LOW_WORDS, _HIGH_WORDS)
    ]
    return [
        _shuffled(builder, pair[0], pair[1], half) for pair in pairs for half in (_LOW_HALVES, _HIGH_HALVES)
    ]


def _shuffled(builder: Any, first: Any, second: Any, places: tuple[int, ...]) -> Any:
    return builder.shuffle_vector(first, second, ir.Constant(ir.VectorType(_WORD, len(places)), list(places)))
