# SPDX-License-Identifier: Apache-2.0
"""What int4 costs trained weights, against brute force: ``python -m benchmarks.trained WEIGHTS.pt``.

Takes every matrix of a PyTorch state dict, at any depth, whose rows are whole groups of 32, and quantises it
to MXFP4 with the OCP exponent and with the one that clips nothing.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.candidates import VALUES, codes_of, squared_errors
from kimi_k3.conversion import cpu
from kimi_k3.conversion.candidates import GROUP_SIZE, MAGNITUDES, amax_rule, mse_rule
from kimi_k3.conversion.loss import total
from kimi_k3.words.weights import Int4Layout

#: Groups below it, hardly weights, would need an exponent of their own.
SMALLEST = 1e-30


def matrices(state: object) -> list[npt.NDArray[Any]]:
    """The matrices in a state dict, as ``[groups, 32]`` float64; of a training's, in its model's part."""
    if isinstance(state, dict) and "model_state" in state:
        return matrices(state["model_state"])
    if isinstance(state, dict):
        return [matrix for value in state.values() for matrix in matrices(value)]
    if isinstance(state, torch.Tensor) and state.dim() == 2 and state.shape[1] % GROUP_SIZE == 0:
        return [state.double().numpy().reshape(-1, GROUP_SIZE)]
    return []


def main() -> None:
    """Measure and print."""
    weights = np.concatenate(matrices(torch.load(sys.argv[1], map_location="cpu", weights_only=True)))
    weights = weights[np.abs(weights).max(axis=1) > SMALLEST]
    print(f"{weights.size:,} weights\n")
    print("| exponent | amax | mse | mse / brute force | amax / mse |\n|---|---|---|---|---|")
    for name, round_up in (("OCP", False), ("round-up", True)):
        largest = np.abs(weights).max(axis=1)
        power = np.ceil(np.log2(largest / MAGNITUDES[-1])) if round_up else np.floor(np.log2(largest)) - 2
        codes = codes_of(weights, round_up=round_up).astype(np.uint8)
        packed = (codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8)[None]
        e8m0 = (power + 127).astype(np.uint8)[None, :, None]
        mse, amax = (
            total(cpu.convert(packed.copy(), e8m0, rule, Int4Layout.PLAIN)[1].losses()).relative_mse or 0.0
            for rule in (mse_rule(), amax_rule())
        )
        counts = np.stack([(codes == code).sum(axis=1) for code in range(16)], axis=1)
        least = (squared_errors(counts).min(axis=1) * 4.0**power).sum()
        brute = least / (counts @ np.square(VALUES) * 4.0**power).sum()
        print(f"| {name} | {amax:.5f} | {mse:.5f} | {mse / brute:.4f} | {amax / mse:.2f} |")


if __name__ == "__main__":
    main()
