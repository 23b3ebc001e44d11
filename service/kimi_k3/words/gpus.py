# SPDX-License-Identifier: Apache-2.0
"""The GPUs this product knows: names, ids and sizes."""

from __future__ import annotations

from dataclasses import dataclass

GIB = 2**30

DRIVER_RESERVED_BYTES = 16 * 2**20
"""What the driver keeps of a GPU's memory: an MI300X of 192 GiB reports 206,141,652,992 bytes. Assumed to be
the same on the others."""


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU.

    Attributes:
        name: how this product calls it.
        title: its maker's name.
        architecture: LLVM's name.
        device_ids: PCI device ids, of physical and virtual functions (``amd.com/gpu.device-id``).
        memory_bytes: what a process can see of its memory.
        compute_units: how many it has.
    """

    name: str
    title: str
    architecture: str
    device_ids: tuple[str, ...]
    memory_bytes: int
    compute_units: int


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("mi300x", "AMD Instinct MI300X", "gfx942", ("74a1",), 192 * GIB - DRIVER_RESERVED_BYTES, 304),
        Gpu(
            "mi325x",
            "AMD Instinct MI325X",
            "gfx942",
            ("74a5", "74b9"),
            256 * GIB - DRIVER_RESERVED_BYTES,
            304,
        ),
        Gpu("mi355x", "AMD Instinct MI355X", "gfx950", ("75a3",), 288 * GIB - DRIVER_RESERVED_BYTES, 256),
    )
}
"""By name. Ids of gfx942: ROCm/k8s-device-plugin, cmd/k8s-node-labeller; of the MI355X: pci.ids."""
