# SPDX-License-Identifier: Apache-2.0
"""``kimi-k3 convert-file``: experts in an npz file converted into another one, for comparisons by script."""

from __future__ import annotations

import tokenize
import zipfile
import zlib
from importlib import import_module
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from kimi_k3.conversion.candidates import GROUP_SIZE, Rule, rule_of
from kimi_k3.conversion.files.atomic import replacing, require_place
from kimi_k3.conversion.files.models import Device, FileReport, LossFigures
from kimi_k3.conversion.layout import check_shape
from kimi_k3.conversion.loss import Tally, total
from kimi_k3.conversion.nonfinite import NonFiniteGroupError
from kimi_k3.errors import ExitCode, OperatorError
from kimi_k3.files import open_regular
from kimi_k3.words.text import printable

if TYPE_CHECKING:
    from pathlib import Path

    import numpy.typing as npt

    from kimi_k3.words.weights import Int4Layout, Requantisation

    Bytes = npt.NDArray[np.uint8]


PACKED, E8M0 = "mxfp4_packed", "e8m0"
"""Names of the arrays that are read."""
RESULTS = ("packed", "scale_bits", "report")
"""Names of those that are written."""

_BAD_ARCHIVE = (
    ValueError,
    EOFError,
    zipfile.BadZipFile,
    zlib.error,
    tokenize.TokenError,
    # From zipfile, of a compression it does not know.
    NotImplementedError,
    RecursionError,
)
"""What numpy lets through of an archive that is damaged, or holds pickled objects."""


def convert_file(
    source: Path,
    target: Path,
    *,
    requantisation: Requantisation,
    layout: Int4Layout,
    device: Device,
) -> None:
    """Convert the experts in ``source`` and write ``target``, whole or not at all.

    Args:
        source: npz with ``mxfp4_packed`` ``[E, N, K / 2]`` and ``e8m0`` ``[E, N, K / 32]``, both uint8.
        target: npz with ``packed``, ``[E, N, K / 2]`` uint8; ``scale_bits``, uint16, flat, in the layout's
            order; ``report``, a JSON string (:class:`FileReport`).

    Raises:
        OperatorError: names the file, array or group that is wrong, or the device that is not there.
    """
    require_place("OUT", target, written_by="convert-file", is_ours=_is_result)
    packed, e8m0 = read_experts(source)
    try:
        check_shape(layout, *e8m0.shape[1:])
    except ValueError as error:
        raise _wrong(source, str(error), "use --layout plain") from None
    try:
        scale_bits, tally = _CONVERTERS[device](
            packed, e8m0, rule_of(requantisation), layout, requantisation.allow_nonfinite
        )
    except NonFiniteGroupError as error:
        raise _wrong(source, str(error), "use --allow-nonfinite to convert it as AITER does") from None
    losses = tally.losses()
    report = FileReport(
        requantisation=requantisation,
        layout=layout,
        device=device,
        total=LossFigures.of(total(losses)),
        experts=tuple(map(LossFigures.of, losses)),
    )
    with replacing(target) as stream:
        np.savez(
            stream, packed=packed, scale_bits=scale_bits.ravel(), report=np.array(report.model_dump_json())
        )


def _is_result(path: Path) -> bool:
    """Whether a file is what :func:`convert_file` writes, and nothing besides: IN is not."""
    try:
        with zipfile.ZipFile(path) as archive:
            return {f"{name}.npy" for name in RESULTS} == set(archive.namelist())
    except zipfile.BadZipFile:
        return False


def read_experts(path: Path) -> tuple[Bytes, Bytes]:
    """Read and check the two arrays of an npz file.

    Returns:
        The nibbles ``[E, N, K / 2]`` and the scales ``[E, N, K / 32]``, both contiguous and writable.

    Raises:
        OperatorError: unreadable, no npz, or an array is missing or has another dtype or shape.
    """
    try:
        with open_regular(path) as file:
            packed, e8m0 = _read_arrays(file, path)
    except OSError as error:
        raise _wrong(
            path, f"cannot be read ({error.strerror or error})", "check the path and its permissions"
        ) from None
    if packed.shape != (*e8m0.shape[:2], e8m0.shape[2] * GROUP_SIZE // 2):
        raise _wrong(
            path,
            f"{PACKED} {list(packed.shape)} and {E8M0} {list(e8m0.shape)} do not belong together",
            "give [E, N, K / 2] and [E, N, K / 32]",
        )
    return packed, e8m0


def _read_arrays(file: BinaryIO, path: Path) -> tuple[Bytes, Bytes]:
    # Asked first, since numpy also opens single arrays and then speaks of pickles.
    if not zipfile.is_zipfile(file):
        raise _wrong(path, "is not an npz file", f"write it with numpy.savez({PACKED}=..., {E8M0}=...)")
    file.seek(0)
    try:
        with np.load(file, allow_pickle=False) as archive:
            return _array(archive, PACKED, path), _array(archive, E8M0, path)
    except _BAD_ARCHIVE as error:
        raise _wrong(path, f"is damaged ({error})", "write it again with numpy.savez") from None
    except RuntimeError:
        raise _wrong(path, "is encrypted", "write it again with numpy.savez") from None
    except MemoryError:
        raise _wrong(path, "is larger than the memory", "convert fewer experts at a time") from None


def _array(archive: Any, name: str, path: Path) -> Bytes:
    if name not in archive.files:
        held = ", ".join(sorted(archive.files)) or "none"
        raise _wrong(path, f"has no array {name} (it has: {held:.200})", "give it mxfp4_packed and e8m0")
    array = archive[name]
    if not isinstance(array, np.ndarray) or array.dtype != np.uint8:
        kind = getattr(array, "dtype", "no array")
        raise _wrong(path, f"array {name} is {kind}, expected uint8", "give the bytes as they are stored")
    if array.ndim != 3 or 0 in array.shape:
        raise _wrong(
            path,
            f"array {name} has shape {list(array.shape)}, expected three axes that are not empty",
            "give [experts, rows, bytes]",
        )
    return np.ascontiguousarray(array)


def _on_cpu(
    packed: Bytes, e8m0: Bytes, rule: Rule, layout: Int4Layout, allow_nonfinite: bool
) -> tuple[npt.NDArray[np.uint16], Tally]:
    """Convert ``packed`` in place."""
    from kimi_k3.conversion import cpu

    return cpu.convert(packed, e8m0, rule, layout, allow_nonfinite=allow_nonfinite)


def _on_gpu(
    packed: Bytes, e8m0: Bytes, rule: Rule, layout: Int4Layout, allow_nonfinite: bool
) -> tuple[npt.NDArray[np.uint16], Tally]:
    """Convert ``packed`` in place, by way of the first CUDA or ROCm device."""
    # By name: nothing else here needs torch, and `make check` holds the command line to that.
    try:
        torch: Any = import_module("torch")
    except ImportError:
        raise _no_device("torch is not installed", "install torch for this device") from None
    if not torch.cuda.is_available():
        raise _no_device("torch sees no CUDA or ROCm device", "check the driver and this process's devices")
    try:
        gpu: Any = import_module("kimi_k3.conversion.gpu")
        converted = torch.from_numpy(packed).cuda()
        scales, tally = gpu.convert(
            converted, torch.from_numpy(e8m0).cuda(), rule, layout, allow_nonfinite=allow_nonfinite
        )
        packed[...] = converted.cpu().numpy()
    except ImportError as error:
        raise _no_device(f"{error.name} is not installed", "install it for this device") from None
    except torch.OutOfMemoryError:
        raise _no_device("its memory is too small", "convert fewer experts at a time") from None
    except RuntimeError as error:
        # The first line: behind it torch explains how to debug its own code.
        raise _no_device(
            printable(str(error).partition("\n")[0]), "check the driver and this process's devices"
        ) from None
    bits: npt.NDArray[np.uint16] = scales.view(torch.uint16).cpu().numpy()
    return bits, tally


_CONVERTERS = {Device.CPU: _on_cpu, Device.CUDA: _on_gpu}


def _no_device(why: str, remedy: str) -> OperatorError:
    return OperatorError(f"--device cuda: {why}", remedy=f"{remedy}, or use --device cpu")


def _wrong(path: Path, what: str, remedy: str) -> OperatorError:
    return OperatorError(printable(f"{path}: {what}"), remedy=remedy, exit_code=ExitCode.FAILED)
