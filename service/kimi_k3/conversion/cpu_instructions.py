# SPDX-License-Identifier: Apache-2.0
"""What :mod:`cpu_kernel` asks of LLVM and numba has no words for."""

from __future__ import annotations

import platform
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from kimi_k3.conversion.candidates import GROUP_SIZE

_HALF = GROUP_SIZE // 2
_BYTE = ir.IntType(8)
SHUFFLES = {
    ("x86_64", 32): ("+avx2", "llvm.x86.avx2.pshuf.b"),
    ("x86_64", 16): ("+ssse3", "llvm.x86.ssse3.pshuf.b.128"),
    ("aarch64", 16): ("+neon", "llvm.aarch64.neon.tbl1.v16i8"),
}
"""By machine and number of bytes: what a core must have, and its instruction that looks each byte
up in the table of 16 that stands in the same 16 places. Elsewhere it is one look-up after another."""


def _bytes(count: int) -> Any:
    return ir.VectorType(_BYTE, count)


def _generate_power_of_two(_: Any, exponent: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        (exponent,) = arguments
        biased = builder.add(exponent, exponent.type(1023))
        return builder.bitcast(builder.shl(biased, exponent.type(52)), ir.DoubleType())

    return types.float64(types.int64), generate


power_of_two = intrinsic(_generate_power_of_two)
"""``2^n`` as float64, for an int64 n from -1022 to 1023."""


def _part(builder: Any, vector: Any, first: int, count: int) -> Any:
    places = ir.Constant(ir.VectorType(ir.IntType(32), count), list(range(first, first + count)))
    return builder.shuffle_vector(vector, vector, places)


def _joined(builder: Any, first: Any, second: Any) -> Any:
    count = 2 * first.type.count
    places = ir.Constant(ir.VectorType(ir.IntType(32), count), list(range(count)))
    return builder.shuffle_vector(first, second, places)


def _look_up(context: Any, builder: Any, table: Any, indices: Any) -> Any:
    """What ``table`` has at ``indices``, for each 16 of both by themselves."""
    count = table.type.count
    _, _, features = context.codegen().magic_tuple()
    needed, name = SHUFFLES.get((platform.machine(), count), (None, None))
    if needed in features.split(","):
        vectors = _bytes(count)
        function = builder.module.declare_intrinsic(name, (), ir.FunctionType(vectors, (vectors, vectors)))
        return builder.call(function, [table, indices])
    if count > _HALF:
        parts = [
            [_part(builder, vector, first, count // 2) for vector in (table, indices)]
            for first in (0, count // 2)
        ]
        return _joined(builder, *(_look_up(context, builder, *part) for part in parts))
    found = ir.Constant(_bytes(count), ir.Undefined)
    for lane in map(ir.IntType(32), range(count)):
        value = builder.extract_element(table, builder.extract_element(indices, lane))
        found = builder.insert_element(found, value, lane)
    return found


def _rewriting(groups: int) -> Any:
    """The instruction for one group, or for two neighbours."""
    codes_type = _bytes(_HALF * groups)
    pairs_type = ir.VectorType(ir.IntType(16), _HALF * groups // 2)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        source, target, scales, rows, largest = (
            context.make_array(kind)(context, builder, value).data
            for kind, value in zip(signature.args[:5], arguments[:5], strict=True)
        )
        group = arguments[5]
        options, octets = (
            [value] if groups == 1 else cgutils.unpack_tuple(builder, value) for value in arguments[6:]
        )

        def load(pointer: Any, index: Any, size: Any) -> Any:
            found = builder.load(builder.bitcast(builder.gep(pointer, [index]), size.as_pointer()))
            found.align = 1
            return found

        def store(value: Any, pointer: Any, index: Any) -> None:
            place = builder.bitcast(builder.gep(pointer, [index]), value.type.as_pointer())
            builder.store(value, place).align = 1

        def times(value: Any, factor: int) -> Any:
            return builder.mul(value, value.type(factor))

        def look_up(behind: int, indices: Any) -> Any:
            """In the tables that stand so many bytes behind the beginning of the options' rows."""
            place = group.type(behind)
            found = [load(start, place, _bytes(_HALF)) for start in starts]
            return _look_up(context, builder, found[0] if groups == 1 else _joined(builder, *found), indices)

        def larger(first: Any, second: Any) -> Any:
            return builder.select(builder.icmp_unsigned(">", first, second), first, second)

        starts = [builder.gep(rows, [times(option, ROW_BYTES)]) for option in options]
        for number, (start, octet) in enumerate(zip(starts, octets, strict=True)):
            place = builder.add(times(octet, 2), octet.type(2 * _HALF))
            store(load(start, place, ir.IntType(16)), scales, builder.add(group, group.type(number)))
        codes = load(source, times(group, _HALF), codes_type)
        low = builder.and_(codes, codes_type([15] * codes_type.count))
        high = builder.lshr(codes, codes_type([4] * codes_type.count))
        # Levels have four bits, so in a shift of pairs of bytes none leaves its byte.
        upper = builder.bitcast(look_up(0, high), pairs_type)
        upper = builder.bitcast(builder.shl(upper, pairs_type([4] * pairs_type.count)), codes_type)
        store(builder.or_(look_up(0, low), upper), target, times(group, _HALF))
        ranks = larger(look_up(_HALF, low), look_up(_HALF, high))
        for number, octet in enumerate(octets):
            place = builder.add(times(octet, 2 * _HALF), octet.type(number * _HALF))
            ours = ranks if groups == 1 else _part(builder, ranks, number * _HALF, _HALF)
            store(larger(load(largest, place, ours.type), ours), largest, place)
        return context.get_dummy_value()

    index = types.int64 if groups == 1 else types.UniTuple(types.int64, 2)

    def typed(
        _: Any,
        source: Any,
        target: Any,
        scales: Any,
        rows: Any,
        largest: Any,
        group: Any,
        option: Any,
        octet: Any,
    ) -> Any:
        return types.void(source, target, scales, rows, largest, types.int64, index, index), generate

    return intrinsic(typed)


ROW_BYTES = 2 * _HALF + 2 * 256
"""Of an option: by code, levels and ranks; by octet, the scale's bits in two bytes each."""

rewrite, rewrite_two = _rewriting(1), _rewriting(2)
"""Replace a group's nibbles by its option's levels, write its scale, and note the ranks that its codes have.

Args:
    source: codes, uint8, 16 bytes to a group.
    target: where the levels go, like ``source``; may be the same.
    scales: uint16, one to a group.
    rows: ``[options, ROW_BYTES]`` uint8; the levels are less than 16.
    largest: ``[octets, 32]`` uint8: the largest ranks so far, in any order.
    group: which one; of two, the first.
    option: the row of ``rows``; for two, a pair.
    octet: the row of ``largest``, and the place of the scale; for two, a pair.
"""
