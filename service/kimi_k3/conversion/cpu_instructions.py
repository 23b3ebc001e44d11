# SPDX-License-Identifier: Apache-2.0
"""What :mod:`cpu_kernel` asks of LLVM and numba has no words for."""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING, Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from kimi_k3.conversion.candidates import GROUP_SIZE

if TYPE_CHECKING:
    from kimi_k3.conversion.candidates import Rule

_BYTE = ir.IntType(8)
_BYTES = ir.VectorType(_BYTE, GROUP_SIZE // 2)
SHUFFLES = {
    "x86_64": "llvm.x86.ssse3.pshuf.b.128",
    "AMD64": "llvm.x86.ssse3.pshuf.b.128",
    "aarch64": "llvm.aarch64.neon.tbl1.v16i8",
    "arm64": "llvm.aarch64.neon.tbl1.v16i8",
}
"""By machine, the instruction that looks 16 bytes up in a table of 16; elsewhere it is 16 look-ups."""


def _generate_popcount(_: Any, word: Any) -> Any:
    return types.uint32(types.uint32), lambda context, builder, signature, arguments: builder.ctpop(
        *arguments
    )


popcount = intrinsic(_generate_popcount)
"""Bits that are set; numba would compute with 64 bits, which costs half of a vector's lanes."""


def _look_up(builder: Any, table: Any, indices: Any) -> Any:
    if name := SHUFFLES.get(platform.machine()):
        function = builder.module.declare_intrinsic(name, (), ir.FunctionType(_BYTES, (_BYTES, _BYTES)))
        return builder.call(function, [table, indices])
    found = ir.Constant(_BYTES, ir.Undefined)
    for lane in map(ir.IntType(32), range(_BYTES.count)):
        value = builder.extract_element(table, builder.extract_element(indices, lane))
        found = builder.insert_element(found, value, lane)
    return found


def _generate_rewrite(
    _: Any, source: Any, target: Any, levels: Any, ranks: Any, group: Any, option: Any
) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        *arrays, group, option = arguments

        def place(number: int, index: Any) -> Any:
            array = context.make_array(signature.args[number])(context, builder, arrays[number])
            return builder.gep(builder.bitcast(array.data, _BYTES.as_pointer()), [index])

        def load(number: int, index: Any) -> Any:
            value = builder.load(place(number, index))
            value.align = 1
            return value

        codes, level, rank = load(0, group), load(2, option), load(3, option)
        low = builder.and_(codes, ir.Constant(_BYTES, [15] * _BYTES.count))
        four = ir.Constant(_BYTES, [4] * _BYTES.count)
        high = builder.lshr(codes, four)
        result = builder.or_(_look_up(builder, level, low), builder.shl(_look_up(builder, level, high), four))
        builder.store(result, place(1, group)).align = 1

        first, second = _look_up(builder, rank, low), _look_up(builder, rank, high)
        larger = builder.select(builder.icmp_unsigned(">", first, second), first, second)
        largest = builder.module.declare_intrinsic(
            f"llvm.vector.reduce.umax.v{_BYTES.count}i8", (), ir.FunctionType(_BYTE, (_BYTES,))
        )
        return builder.call(largest, [larger])

    return types.uint8(source, target, levels, ranks, types.int64, types.int64), generate


rewrite = intrinsic(_generate_rewrite)
"""Replace a group's nibbles by what a table has for them, and find the largest that another table has.

Args:
    source: codes, uint8, 16 bytes to a group.
    target: where the levels go, like ``source``; may be the same.
    levels: ``[options, 16]`` uint8.
    ranks: ``[options, 16]`` uint8.
    group: which one.
    option: the tables' row.
"""


def least_key(rule: Rule) -> tuple[Any, Any, int]:
    """The choice, as straight code without the terms that are 0.

    Returns:
        A function of the counts of codes 1-7, and of the negative ones among them, that gives the key of the
        option that an ordinary group gets, ``squared error << shift | option``; the key's numpy type; and the
        shift.
    """
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

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        word = context.get_value_type(key)

        def counts(argument: Any) -> list[Any]:
            values = cgutils.unpack_tuple(builder, argument)
            return values if key is types.uint32 else [builder.zext(value, word) for value in values]

        def add(total: Any, count: Any, weight: int) -> Any:
            return builder.add(total, builder.mul(count, word(weight << shift))) if weight else total

        every, negative = counts(arguments[0]), counts(arguments[1])
        least = word(0)
        for option, short, long, sign in options:
            value = word(0)
            for code in range(1, 8):
                value = add(value, every[code - 1], short[code])
            for code in range(1, 8):
                if long[code] != short[code]:
                    below = negative[code - 1]
                    side = below if sign > 0 else builder.sub(every[code - 1], below)
                    value = add(value, side, long[code] - short[code])
            value = builder.add(value, word(option))
            if rule.by_error:
                better = builder.icmp_unsigned("<", value, least)
            else:
                # The option of code k is number k - 1, and the last one that is there is the largest.
                better = builder.icmp_unsigned("!=", every[option], word(0))
            least = builder.select(better, value, least) if option else value
        return least

    def typed(_: Any, every: Any, negative: Any) -> Any:
        return key(every, negative), generate

    return intrinsic(typed), getattr(np, key.name), shift
