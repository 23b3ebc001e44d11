# SPDX-License-Identifier: Apache-2.0
"""How good a set of candidate scales is, against brute force over all bf16 scales; and the best sets.

``python -m benchmarks.candidates [GROUPS]``: deterministic, about a minute for 3000 groups of each kind.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import numpy.typing as npt

from kimi_k3.conversion.candidates import GROUP_SIZE, MAGNITUDES, MSE_SCALES

Array = npt.NDArray[Any]

EXACT_PRODUCTS = (0.5, 1.0, 0.5625, 0.6875, 0.71875, 0.75, 0.78125, 0.84375)
"""Scales whose products with every level are exact in bf16, whatever the rounding: for comparison."""
VALUES = np.array([*MAGNITUDES, *(-value for value in MAGNITUDES)])
#: All bf16 numbers here; beyond, a scale is never the best one.
SCALES = np.array(
    [m * 2.0 ** (e - 7) for e in range(-3, 1) for m in range(128, 256) if 0.2 <= m * 2.0 ** (e - 7) <= 1.3]
)
#: Among these a set is searched for.
POOL = [number for number, scale in enumerate(SCALES) if 0.45 <= scale <= 1.05]


def codes_of(weights: Array, *, round_up: bool) -> Array:
    """MXFP4 codes of ``[n, 32]`` weights, with the OCP exponent or the one that clips nothing."""
    largest = np.abs(weights).max(axis=1)
    exponent = np.ceil(np.log2(largest / 6)) if round_up else np.floor(np.log2(largest)) - 2
    scaled = np.abs(weights) / 2.0 ** exponent[:, None]
    middles = (np.array(MAGNITUDES[1:]) + np.array(MAGNITUDES[:-1])) / 2
    codes: Array = np.searchsorted(middles, scaled) + 8 * (weights < 0)
    return codes


def kinds(groups: int) -> dict[str, Array]:
    """Counts of the 16 codes, ``[groups, 16]``, of each kind of weights."""
    random = np.random.default_rng(0)
    shape = (groups, GROUP_SIZE)
    weights = {
        "Gaussian": random.standard_normal(shape),
        "Laplace": random.laplace(size=shape),
        "Student-t 3": random.standard_t(3, shape),
        "Student-t 5": random.standard_t(5, shape),
    }
    return {
        f"{name}, {'round-up' if round_up else 'OCP'}": np.stack(
            [(codes_of(values, round_up=round_up) == code).sum(axis=1) for code in range(16)], axis=1
        )
        for name, values in weights.items()
        for round_up in (False, True)
    }


def squared_errors(counts: Array) -> Array:
    """``[groups, scales]``: squared error with each scale, of the better sign."""
    products = np.arange(-8, 8) * np.stack([SCALES, -SCALES])[..., None]
    mantissa, exponent = np.frexp(products)
    rounded = np.ldexp(np.rint(mantissa * 256), exponent - 8)
    table = np.square(VALUES[:, None] - rounded[..., None, :]).min(axis=-1)
    errors: Array = (counts @ table.transpose(0, 2, 1)).min(axis=0)
    return errors


def main() -> None:
    """Measure and print."""
    errors = {
        name: squared_errors(counts)
        for name, counts in kinds(int(sys.argv[1] if sys.argv[1:] else 3000)).items()
    }
    least = {name: of.min(axis=1).sum() for name, of in errors.items()}

    def ratios(numbers: list[int]) -> list[float]:
        return [float(of[:, numbers].min(axis=1).sum() / least[name]) for name, of in errors.items()]

    def score(numbers: list[int]) -> float:
        return float(np.mean(ratios(numbers)))

    def show(what: str, numbers: list[int]) -> None:
        print(f"| {what} | {' | '.join(f'{ratio:.4f}' for ratio in ratios(numbers))} |", flush=True)

    print(f"| set | {' | '.join(errors)} |\n|{'---|' * (len(errors) + 1)}")
    for what, scales in (("ours", MSE_SCALES), ("exact products", EXACT_PRODUCTS)):
        show(what, [int(np.flatnonzero(scale == SCALES)[0]) for scale in scales])
    for size in range(5, 11):
        chosen: list[int] = []
        while len(chosen) < size:
            chosen.append(
                min((one for one in POOL if one not in chosen), key=lambda one: score([*chosen, one]))
            )
        better = True
        while better:
            better = False
            for place in range(size):
                rest = chosen[:place] + chosen[place + 1 :]
                best = [*rest, min(POOL, key=lambda one: score([*rest, one]))]
                if score(best) < score(chosen) - 1e-6:
                    chosen, better = best, True
        show(f"best {size}: {', '.join(str(SCALES[one]) for one in sorted(chosen))}", chosen)


if __name__ == "__main__":
    main()
