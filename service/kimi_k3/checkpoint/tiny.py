# SPDX-License-Identifier: Apache-2.0
"""Write a tiny Kimi-K3 checkpoint in the published checkpoint's format.

Same names, dtypes, quantisation and files; eight layers and noise for weights. It exists so that the
real engine, loader and conversion run on any machine. The text it generates reads as ASCII noise.
"""

from __future__ import annotations

import importlib.util
import json
import math
import shutil
import tempfile
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kimi_k3.checkpoint import tiny_files
from kimi_k3.checkpoint.config import MX_GROUP_SIZE, KimiK3Config
from kimi_k3.checkpoint.headers import LENGTH_BYTES
from kimi_k3.checkpoint.layout import EXPERT_PARTS, TEXT_PREFIX, TensorSpec, all_tensors, expert_prefix
from kimi_k3.errors import ExitCode, OperatorError
from kimi_k3.words.text import printable

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float32]
    Bytes = NDArray[np.uint8]

SHARDS: Final = 3
INDEX_NAME: Final = "model.safetensors.index.json"

#: E2M1 (OCP Microscaling Formats 1.0, table 5): magnitudes 0, .5, 1, 1.5, 2, 3, 4, 6 for codes 0..7. The
#: code of x is the number of midpoints below it; at a midpoint the even code wins, so every other one is
#: inclusive.
_MIDPOINTS: Final = (
    (0.25, False),
    (0.75, True),
    (1.25, False),
    (1.75, True),
    (2.5, False),
    (3.5, True),
    (5.0, False),
)
#: Exponent of E2M1's largest magnitude, 6 = 1.5 * 2**2, which the scale rule subtracts (ibid., section 6.3).
_E2M1_EMAX: Final = 2
_E8M0_BIAS: Final = 127
#: Standard deviation of a projection's weights in units of the one that keeps variance; others have 1.
GAINS: Final = {
    # Attention scores of standard deviation 2: neither flat nor one-hot.
    "q_b_proj": 2.0,
    # The decay follows the input gently around its bias.
    "f_b_proj": 0.3,
    # Routed experts are normed to unit size before this. A network of noise multiplies every rounding
    # error; at 1 the int4 experts would change the answer from its first token on.
    "routed_expert_up_proj": 0.2,
}
#: (layer, expert, projection) whose first group in each of the first eight rows is all zero.
ZERO_GROUPS: Final = ((1, 0, "w1"), (1, 0, "w2"), (3, 5, "w3"))
_ZERO_ROWS: Final = 8


def quantize_mxfp4(values: Floats) -> tuple[Bytes, Bytes]:
    """Quantise to MXFP4 by the OCP rule.

    Args:
        values: float32 ``[N, K]``, K a multiple of 32, finite.

    Returns:
        Codes, uint8 ``[N, K/2]``, low nibble = even column, and E8M0 scales, uint8 ``[N, K/32]``.
        A group of zeros gets scale 0 (2**-127) and codes 0.
    """
    import numpy as np

    rows, columns = values.shape
    groups = values.reshape(rows, columns // MX_GROUP_SIZE, MX_GROUP_SIZE)
    amax = np.abs(groups).max(axis=-1)
    # frexp is exact where log2 is not: amax = m * 2**e with 0.5 <= m < 1, so floor(log2(amax)) = e - 1.
    exponent = np.frexp(amax)[1] - 1 - _E2M1_EMAX
    scale = np.where(amax > 0, np.clip(exponent + _E8M0_BIAS, 0, 254), 0)
    scaled = np.ldexp(np.abs(groups), (_E8M0_BIAS - scale)[..., None].astype(np.int32))
    codes = np.zeros(groups.shape, dtype=np.uint8)
    for midpoint, inclusive in _MIDPOINTS:
        codes += (scaled >= midpoint) if inclusive else (scaled > midpoint)
    # A negative value that rounds to zero keeps its sign: code 8 is minus zero.
    codes |= np.left_shift(np.signbit(groups).astype(np.uint8), np.uint8(3))
    flat = codes.reshape(rows, columns)
    packed: Bytes = np.bitwise_or(flat[:, 0::2], np.left_shift(flat[:, 1::2], np.uint8(4)))
    return packed, scale.astype(np.uint8)


def bfloat16_bits(values: Floats) -> NDArray[np.uint16]:
    """Round finite float32 to bfloat16, nearest even; the result's bits."""
    import numpy as np

    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def _noise(seed: int, name: str, shape: tuple[int, ...], std: float) -> Floats:
    """Gaussian noise that depends on the seed and the tensor's name only, not on the order of writing."""
    import numpy as np

    generator = np.random.Generator(np.random.PCG64([seed, zlib.crc32(name.encode())]))
    return generator.standard_normal(shape, dtype=np.float32) * np.float32(std)


def _fan_in(shape: tuple[int, ...]) -> float:
    """Standard deviation that keeps a unit input at unit variance."""
    return 1.0 / math.sqrt(math.prod(shape[1:]) or 1)


def _a_log(seed: int, spec: TensorSpec) -> Floats:
    """log of a rate in [1, 16], Kimi-Linear's initialisation; the padding behind the heads stays zero."""
    import numpy as np

    values = np.zeros(spec.shape, dtype=np.float32)
    values[: tiny_files.HEADS] = np.log(1 + 15 * _uniform(_noise(seed, spec.name, (tiny_files.HEADS,), 1.0)))
    return values


def _uniform(noise: Floats) -> Floats:
    """Map Gaussian noise into (0, 1) by the logistic function."""
    import numpy as np

    return np.float32(1) / (np.float32(1) + np.exp(-noise))


def _lm_head(seed: int, spec: TensorSpec) -> Floats:
    """Rows of printable tokens only, so that the largest logit is always a printable token's."""
    import numpy as np

    values = np.zeros(spec.shape, dtype=np.float32)
    rows = tiny_files.printable_tokens()
    # With a unit-RMS input this makes logits of standard deviation 3: clear winners, no certainty.
    values[rows] = _noise(seed, spec.name, (len(rows), spec.shape[1]), 3 * _fan_in(spec.shape))
    return values


def _plain(seed: int, spec: TensorSpec) -> Floats:
    """Float32 values of a tensor that is not a routed expert's."""
    name, shape = spec.name, spec.shape
    if name == f"{TEXT_PREFIX}lm_head.weight":
        return _lm_head(seed, spec)
    if name.endswith(".A_log"):
        return _a_log(seed, spec)
    if name.endswith(".dt_bias"):
        # With the rates of A_log most channels remember for many tokens and some forget at once.
        return _noise(seed, name, shape, 0.5) - 1
    if name.endswith((".e_score_correction_bias", ".pos_emb.weight")):
        return _noise(seed, name, shape, 0.02)
    if "norm" in name.rsplit(".", 2)[-2]:
        return _noise(seed, name, shape, 0.1) + 1
    if name.endswith("embed_tokens.weight"):
        # Smaller than what a layer adds, so that the answer depends on the context, not the last token.
        return _noise(seed, name, shape, 0.5)
    if name.endswith("_conv1d.weight"):
        return _noise(seed, name, shape, 0.5)
    return _noise(seed, name, shape, GAINS.get(name.rsplit(".", 2)[-2], 1.0) * _fan_in(shape))


def _expert(seed: int, layer: int, expert: int, projection: str, shape: tuple[int, int]) -> Floats:
    name = f"{expert_prefix(layer, expert)}.{projection}"
    values = _noise(seed, name, shape, _fan_in(shape))
    if (layer, expert, projection) in ZERO_GROUPS:
        values[:_ZERO_ROWS, :MX_GROUP_SIZE] = 0
    return values


def _little_endian(spec: TensorSpec, seed: int) -> bytes:
    """The bytes of one tensor in the file."""
    stem, _, part = spec.name.rpartition(".")
    if part in EXPERT_PARTS:
        layer, expert, projection = (stem.split(".")[i] for i in (3, 6, 7))
        columns = spec.shape[1] * (2 if part == "weight_packed" else MX_GROUP_SIZE)
        values = _expert(seed, int(layer), int(expert), projection, (spec.shape[0], columns))
        return quantize_mxfp4(values)[EXPERT_PARTS.index(part)].tobytes()
    plain = _plain(seed, spec)
    if spec.dtype == "BF16":
        return bfloat16_bits(plain).astype("<u2").tobytes()
    return plain.astype("<f4").tobytes()


def safetensors_header(specs: Sequence[TensorSpec]) -> bytes:
    """Length field and JSON header of a safetensors file that holds ``specs`` in this order."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for spec in specs:
        entries[spec.name] = {
            "dtype": spec.dtype,
            "shape": list(spec.shape),
            "data_offsets": [start, start + spec.nbytes],
        }
        start += spec.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    # The reference writer aligns the data to eight bytes.
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def split_shards(specs: Sequence[TensorSpec], shards: int) -> list[list[TensorSpec]]:
    """Cut ``specs`` into ``shards`` runs of about equal bytes, order kept."""
    total = sum(spec.nbytes for spec in specs)
    runs: list[list[TensorSpec]] = [[] for _ in range(shards)]
    done = 0
    for spec in specs:
        runs[min(shards - 1, done * shards // total)].append(spec)
        done += spec.nbytes
    return runs


def shard_name(number: int, shards: int) -> str:
    """``model-00001-of-000003.safetensors``, the published checkpoint's pattern (``number`` from 1)."""
    return f"model-{number:05d}-of-{shards:06d}.safetensors"


def _json_text(value: object) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def _write(directory: Path, seed: int) -> None:
    files = tiny_files.json_files()
    config = KimiK3Config.model_validate_json(json.dumps(files["config.json"]))
    for name, content in files.items():
        (directory / name).write_text(_json_text(content), encoding="utf-8")
    runs = split_shards(tuple(all_tensors(config)), SHARDS)
    weight_map: dict[str, str] = {}
    for number, specs in enumerate(runs, start=1):
        name = shard_name(number, SHARDS)
        weight_map.update((spec.name, name) for spec in specs)
        with (directory / name).open("wb") as file:
            file.write(safetensors_header(specs))
            for spec in specs:
                file.write(_little_endian(spec, seed))
    total = sum(spec.nbytes for specs in runs for spec in specs)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / INDEX_NAME).write_text(_json_text(index), encoding="utf-8")


def make_tiny_checkpoint(directory: Path, *, seed: int = 0) -> None:
    """Write a tiny Kimi-K3 checkpoint (about 14 MB) into ``directory``.

    The same seed gives the same bytes. The directory appears complete or not at all: everything is
    written into a temporary sibling, which is then renamed. Parents that do not exist are created.

    Args:
        directory: must not exist, or be empty.
        seed: of all weights; not negative.

    Raises:
        OperatorError: the directory has files in it, its parent cannot be written to (read-only, full), or
            numpy is not installed.
    """
    if importlib.util.find_spec("numpy") is None:
        raise OperatorError(
            "the tiny checkpoint needs numpy, which is not installed",
            remedy="install the package with its extra: kimi-k3-gfx942[cpu]",
        )
    temporary: Path | None = None
    try:
        if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
            raise OperatorError(
                f"{printable(str(directory))} exists and is not an empty directory",
                remedy="name a new directory",
                exit_code=ExitCode.USAGE,
            )
        directory.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
        # mkdtemp gives 0o700; a checkpoint is read by other users, e.g. of a container.
        temporary.chmod(0o755)
        _write(temporary, seed)
        temporary.rename(directory)
        temporary = None
    except OSError as error:
        raise OperatorError(
            f"the tiny checkpoint {printable(str(directory))} cannot be written ({error.strerror})",
            remedy="free some space or choose a directory you may write to",
        ) from None
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)
