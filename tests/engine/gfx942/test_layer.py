# SPDX-License-Identifier: Apache-2.0
"""int4 on gfx942 without the silicon: both versions of vLLM, a double of AITER, CPU tensors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kimi_k3.checkpoint import make_tiny_checkpoint
from tests.reference import int4
from tests.surroundings import SURROUNDINGS
from tests.wheels import VERSIONS, vllm_source

HERE = Path(__file__).parent
GOLDEN = HERE.parents[1] / "reference" / "data"
ENVIRONMENT = {
    "KIMI_K3_ACCEPT_LOSSY": "1",
    "VLLM_ROCM_USE_AITER": "1",
    "VLLM_ROCM_USE_AITER_FP8BMM": "0",
    "VLLM_ROCM_USE_AITER_MLA": "0",
    "VLLM_ROCM_USE_AITER_MOE_SITUV2": "a16w4",
}
"""As of the profiles, and consent."""

Array = npt.NDArray[Any]
HIDDEN, INTERMEDIATE = 256, 128
"""K3 has 3584 and 3072 (384 on one of eight GPUs); the kernels want multiples of 128."""


def start(
    directory: Path, version: str, cases: dict[str, dict[str, Any]], **environment: str
) -> dict[str, dict[str, Any]]:
    """What became of each case, by its name."""
    make_tiny_checkpoint(directory / "tiny")
    for name, case in cases.items():
        case.update(checkpoint=str(directory / "tiny"), result=str(directory / f"{name}.npz"))
    (directory / "cases.json").write_text(json.dumps(cases))
    path = [HERE / "double", vllm_source(version).parent, HERE.parents[2] / "service"]
    found = subprocess.run(
        [sys.executable, "-P", str(HERE / "layer.py"), str(directory / "cases.json")],
        env=SURROUNDINGS | ENVIRONMENT | {"PYTHONPATH": os.pathsep.join(map(str, path))} | environment,
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert found.returncode == 0, found.stdout + found.stderr
    (directory / "stderr").write_text(found.stderr)
    told = [json.loads(line[5:]) for line in found.stdout.splitlines() if line.startswith("TOLD ")]
    return {each.pop("case"): each | {"said": found.stderr} for each in told}


@cache
def golden_weights() -> tuple[dict[str, Array], dict[str, Array]]:
    """Experts put together of AITER's own golden matrices, and the bytes that AITER made of them.

    A strip of 16 rows is converted for itself, so matrices can be stacked.
    """
    wide, narrow = (np.load(GOLDEN / f"amax_{name}.npz") for name in ("all_exponents", "small"))
    order = [[0, 1, 1, 0], [1, 1, 0, 0], [0, 0, 1, 1], [1, 0, 0, 1]]
    down = [[0, 1, 2, 0], [2, 1, 0, 1], [1, 1, 2, 2], [0, 2, 0, 1]]

    def stacked(data: Array, picks: list[list[int]]) -> Array:
        return np.stack([np.concatenate([data[pick] for pick in expert]) for expert in picks])

    def scales(data: Any, picks: list[list[int]]) -> Array:
        experts, rows, groups = data["e8m0"].shape
        pairs = data["scale_shuffled_bf16_bits"].reshape(experts, groups // 2, rows, 2)
        return np.stack([np.concatenate([pairs[pick] for pick in expert], axis=1) for expert in picks])

    w13, w13_scale = stacked(wide["mxfp4_packed"], order), stacked(wide["e8m0"], order)
    given = {
        "w1": w13[:, :INTERMEDIATE],
        "w3": w13[:, INTERMEDIATE:],
        "w1_scale": w13_scale[:, :INTERMEDIATE],
        "w3_scale": w13_scale[:, INTERMEDIATE:],
        "w2": stacked(narrow["mxfp4_packed"], down),
        "w2_scale": stacked(narrow["e8m0"], down),
    }
    made = {
        "w1": stacked(wide["packed_shuffled"], order),
        "w1_scale": scales(wide, order),
        "w2": stacked(narrow["packed_shuffled"], down),
        "w2_scale": scales(narrow, down),
    }
    return given, made


@cache
def random_weights(intermediate: int = INTERMEDIATE) -> dict[str, Array]:
    """Every code, exponents as of trained weights."""
    random = np.random.default_rng(5)
    found = {}
    for name, rows, columns in (
        ("w1", intermediate, HIDDEN),
        ("w3", intermediate, HIDDEN),
        ("w2", HIDDEN, intermediate),
    ):
        found[name] = random.integers(0, 256, (4, rows, columns // 2), dtype=np.uint8)
        found[f"{name}_scale"] = random.integers(118, 124, (4, rows, columns // 32), dtype=np.uint8)
    return found


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    directory = tmp_path_factory.mktemp("weights")
    files = {}
    for name, arrays in (
        ("golden", golden_weights()[0]),
        ("random", random_weights()),
        ("odd", random_weights(192)),
    ):
        files[name] = str(directory / f"{name}.npz")
        np.savez(files[name], allow_pickle=False, **arrays)
    return files


AMAX = {"KIMI_K3_SCALE_RULE": "amax", "KIMI_K3_ALLOW_NONFINITE": "1"}
FAULTS = ("nibbles", "pairs", "silu", "eight")


@pytest.fixture(scope="module", params=VERSIONS)
def ours(
    request: pytest.FixtureRequest, weights: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Any]]:
    """All cases with the plugin, in one process per version."""
    cases: dict[str, dict[str, Any]] = {
        "amax": {"weights": weights["golden"], "environment": AMAX},
        "mse": {},
        "half": {"half": True},
        "another rank": {"local_rank": 3},
        "two layers": {"layers": 2},
        "deaf": {"deaf": True},
        "rounded": {"weights": weights["odd"]},
        "processed": {"processed": True},
        "reload": {"reload": True},
        "transfer": {"configuration": {"weight_transfer_config": {"backend": "nccl"}}},
        "offload": {"arguments": {"cpu_offload_gb": 1.0}},
        "fp8 cache": {"arguments": {"kv_cache_dtype": "fp8"}},
        "fp8 projections": {"environment": {"VLLM_ROCM_USE_AITER_FP8BMM": "1"}},
        "spelt": {
            "environment": {"VLLM_ROCM_USE_AITER": "True"},
            "arguments": {"logprobs_mode": "raw_logprobs"},
        },
        "silu model": {"activation": "silu"},
        "twice": {"times": 2},
        "lossless": {"int4": False},
        "no consent": {"environment": {"KIMI_K3_ACCEPT_LOSSY": "0"}},
        "no aiter": {"environment": {"VLLM_ROCM_USE_AITER": "0"}},
        "no aiter moe": {"environment": {"VLLM_ROCM_USE_AITER_MOE": "0"}},
        "a4w4": {"environment": {"VLLM_ROCM_USE_AITER_MOE_SITUV2": "a4w4"}},
        "mla": {"environment": {"VLLM_ROCM_USE_AITER_MLA": "1"}},
        "sampler": {"arguments": {"logprobs_mode": "raw_logprobs"}},
        "eplb": {"configuration": {"parallel_config.enable_eplb": True}},
        "sleep": {"configuration": {"model_config.enable_sleep_mode": True}},
        "no linear beta": {"linear_beta": None},
        "signs": {"environment": {"DOUBLE_FAULT": "signs"}},
        **{fault: {"environment": {"DOUBLE_FAULT": fault}} for fault in FAULTS},
    }
    for case in cases.values():
        case.setdefault("weights", weights["random"])
    return start(tmp_path_factory.mktemp("ours"), request.param, cases) | {"results": {"of": cases}}


@pytest.fixture(scope="module", params=VERSIONS)
def stock(
    request: pytest.FixtureRequest, weights: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, dict[str, Any], Path]:
    """vLLM's own way, without the plugin."""
    directory = tmp_path_factory.mktemp("stock")
    told = start(directory, request.param, {"amax": {"weights": weights["golden"]}}, VLLM_PLUGINS="")
    return request.param, told["amax"], directory / "amax.npz"


def handed(ours: dict[str, dict[str, Any]], case: str) -> Any:
    return np.load(ours["results"]["of"][case]["result"])


def test_amax_hands_over_what_aiter_makes(ours: dict[str, dict[str, Any]]) -> None:
    """Bit for bit AITER's own golden vectors, all exponents, in both projections."""
    assert "error" not in ours["amax"], ours["amax"]
    found, made = handed(ours, "amax"), golden_weights()[1]
    for name in ("w1", "w2"):
        assert np.array_equal(found[name], made[name])
        assert np.array_equal(found[f"{name}_scale"].view(np.uint16).ravel(), made[f"{name}_scale"].ravel())


def test_mse_hands_over_what_the_reference_makes(ours: dict[str, dict[str, Any]]) -> None:
    """The independent reference, decoded from the kernel's layout by the double's own steps."""
    assert "error" not in ours["mse"], ours["mse"]
    found, given = handed(ours, "mse"), random_weights()
    for name, parts in (("w1", ("w1", "w3")), ("w2", ("w2",))):
        packed = np.concatenate([given[part] for part in parts], axis=1)
        e8m0 = np.concatenate([given[f"{part}_scale"] for part in parts], axis=1)
        expected = int4.requantise(packed, e8m0, "mse")[0].dequantise()
        assert np.array_equal(decoded(found[name], found[f"{name}_scale"], *expected.shape), expected)


def decoded(raw: Array, scales: Array, experts: int, rows: int, columns: int) -> Array:
    """Values of bytes in the layout of AITER's kernels."""
    runs = raw.view(np.uint8).reshape(-1, 4)
    nibbles = np.concatenate([runs & 0xF, runs >> 4], axis=1).reshape(-1).astype(np.int16)
    tiles = nibbles.reshape(experts, rows // 16, columns // 32, 2, 16, 16).transpose(0, 1, 4, 2, 3, 5)
    levels = tiles.reshape(experts, rows, columns)
    levels = np.where(levels > 7, levels - 16, levels)
    bits = scales.view(np.uint16).reshape(experts, columns // 64, rows, 2).transpose(0, 2, 1, 3)
    values = (bits.astype(np.uint32) << 16).view(np.float32).reshape(experts, rows, columns // 32)
    exact = levels * np.repeat(values, 32, axis=-1).astype(np.float64)
    rounded: Array = int4.round_bf16(exact)
    return rounded


def test_what_the_kernel_is_handed(ours: dict[str, dict[str, Any]]) -> None:
    """In the memory that was there, in the shapes and dtypes of vLLM's own conversion, after ten canaries."""
    assert ours["mse"] | {"said": ""} == {
        "method": "KimiK3Int4Method",
        "vllm_backend": "AITER_MXFP4_BF16",
        "experts": "AiterInt4Experts",
        "eplb": False,
        "backend": "AITER_INT4_BF16",
        "signs": True,
        "did": "scale rule mse",
        "in_place": True,
        "calls": 11,
        "shapes": {"w1": [4, 256, 128], "w2": [4, 256, 64], "w1_scale": [8192], "w2_scale": [4096]},
        "dtypes": {"w1": "int8", "w2": "int8", "w1_scale": "bfloat16", "w2_scale": "bfloat16"},
        "said": "",
    }
    assert np.isfinite(handed(ours, "mse")["output"]).all()


def test_the_canary_says_so(ours: dict[str, dict[str, Any]]) -> None:
    """One line for whoever reads the log."""
    assert (
        "kimi-k3: canary: AITER_INT4_BF16 is right for batches of 1, 4, 7, 16, 32 tokens"
        in (ours["mse"]["said"])
    )


def test_every_rank_of_a_node(ours: dict[str, dict[str, Any]]) -> None:
    """vLLM's log shows the announcement on one rank of a node; the others convert as well."""
    assert ours["another rank"].get("experts") == "AiterInt4Experts", ours["another rank"]


def test_the_kernel_is_proved_once(ours: dict[str, dict[str, Any]]) -> None:
    """Not for each of 92 layers."""
    assert ours["two layers"]["calls"] == ours["mse"]["calls"]


def test_the_canary_of_expert_parallelism(ours: dict[str, dict[str, Any]]) -> None:
    """With the mask by which AITER tells a rank's experts, and chooses its kernels."""
    assert ours["half"]["half"] < 0.01


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("nibbles", "nibble order"),
        ("pairs", "scales of even and odd groups are swapped"),
        ("silu", "SiLU is computed instead of SiTU"),
        ("eight", "level -8 is taken for 8"),
    ],
)
def test_a_wrong_kernel_serves_nothing(ours: dict[str, dict[str, Any]], fault: str, words: str) -> None:
    """Four of the five mutations end the start, each by its name."""
    assert ours[fault]["type"] == "OperatorError"
    assert "canary: AITER_INT4_BF16 answers wrongly" in ours[fault]["error"]
    assert words in ours[fault]["error"]


def test_a_kernel_that_ignores_signs_gets_none(ours: dict[str, dict[str, Any]]) -> None:
    """The fifth: the conversion goes on without negative scales, and says so."""
    assert ours["signs"]["experts"] == "AiterInt4Experts"
    assert "answers wrongly for negative scales" in ours["signs"]["said"]
    assert (ours["signs"]["signs"], ours["signs"]["did"]) == (False, "scale rule mse, no negative scales")
    assert (handed(ours, "mse")["w1_scale"].view(np.uint16) >> 15).any()
    assert not (handed(ours, "signs")["w1_scale"].view(np.uint16) >> 15).any()


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("twice", "its experts are int4 already"),
        ("no consent", "is a lossy conversion and KIMI_K3_ACCEPT_LOSSY is not 1"),
        ("no aiter", "weights int4 needs VLLM_ROCM_USE_AITER=1"),
        ("no aiter moe", "weights int4 needs VLLM_ROCM_USE_AITER_MOE=1"),
        ("a4w4", "VLLM_ROCM_USE_AITER_MOE_SITUV2=a4w4: gfx942 has only a16w4"),
        ("mla", "needs VLLM_ROCM_USE_AITER_MLA=0 on gfx942"),
        ("sampler", "needs --logprobs-mode processed_logprobs on gfx942"),
        ("eplb", "--enable-eplb with --quantization-config.moe.weight int4_per_group_32"),
        ("sleep", "--enable-sleep-mode with --quantization-config.moe.weight int4_per_group_32"),
        ("no linear beta", "the checkpoint names no linear beta for SiTU"),
        ("deaf", "vLLM did not announce the lossy conversion"),
        ("rounded", "rounds the experts' hidden and intermediate sizes up from (256, 192) to (256, 256)"),
        ("processed", "weights from a cache of processed weights would be converted again"),
        ("reload", "reload_weights: converted experts cannot be loaded over"),
        ("transfer", "--weight-transfer-config with"),
        ("offload", "--cpu-offload-gb with"),
        ("fp8 cache", "--kv-cache-dtype fp8"),
        ("fp8 projections", "needs VLLM_ROCM_USE_AITER_FP8BMM=0 on gfx942"),
        ("spelt", "needs --logprobs-mode processed_logprobs on gfx942"),
        ("silu model", "int4 kernels have only situ, these experts use silu"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(
    ours: dict[str, dict[str, Any]], case: str, words: str
) -> None:
    """Each of these serves something else than was asked for in stock vLLM, or crashes later."""
    assert ours[case].get("type") == "OperatorError", ours[case]
    assert words in ours[case]["error"]


def test_an_aiter_without_the_activation(weights: dict[str, str], tmp_path: Path) -> None:
    """It would compute SiLU, fluently: refused before the canary has to find out."""
    told = start(tmp_path, VERSIONS[-1], {"old": {"weights": weights["random"]}}, DOUBLE_FAULT="old")["old"]
    assert told["type"] == "OperatorError"
    assert "takes no act and would compute SiLU" in told["error"]


def test_lossless_weights_are_vllms_own_choice(ours: dict[str, dict[str, Any]]) -> None:
    """On gfx942 that is its emulation; the plugin only reports."""
    assert ours["lossless"]["method"] == "KimiK3Mxfp4Method"
    assert ours["lossless"]["vllm_backend"] == ours["lossless"]["backend"] == "EMULATION"


def test_the_double_is_faithful(stock: tuple[str, dict[str, Any], Path]) -> None:
    """vLLM's own conversion with the double's functions makes AITER's golden bytes, too.

    0.32.0 does not get that far: it converts everything, then asks its experts' class for MXFP4 only, and
    ends. The plugin serves there all the same.
    """
    version, told, result = stock
    if version == "0.32.0":
        assert told["type"] == "ValueError"
        assert "AiterExperts does not support this MoE deployment" in told["error"]
        return
    assert told["experts"] == "AiterMxfp4Experts"
    assert not told["in_place"]
    found, made = np.load(result), golden_weights()[1]
    for name in ("w1", "w2"):
        assert np.array_equal(found[name], made[name].view(found[name].dtype))
        assert np.array_equal(found[f"{name}_scale"].view(np.uint16).ravel(), made[f"{name}_scale"].ravel())
