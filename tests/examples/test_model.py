# SPDX-License-Identifier: Apache-2.0
"""The miniature's training model computes what the reference forward computes of the exported checkpoint."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from examples.miniature import export, train, vocabulary
from examples.miniature.model import CHUNK, Experts, Miniature, Sizes, inverse_of_unit_lower, kda_scan
from examples.miniature.quantise import mxfp4_values, through_mxfp4
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from kimi_k3.checkpoint import inspect_checkpoint
from kimi_k3.checkpoint.tiny import quantize_mxfp4
from kimi_k3.conversion.mxfp4 import dequantize_mxfp4
from tests.reference import forward
from tests.reference.forward import ReferenceModel

SMALL = Sizes(
    hidden=64, layers=5, heads=2, q_rank=32, kv_rank=64, nope=32, rope=16, v_dim=32, full_attention=(1, 3),
    kda_heads=3, kda_dim=16, block=2, dense_intermediate=96, experts=6, top_k=2, shared_experts=2,
    expert_intermediate=32, latent=64,
)  # fmt: skip
MERGES = [("a", "b"), ("Ġ", "t")]


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """One thread: the matrices are small."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def model() -> Miniature:
    """Random weights in the values that the published format keeps, every part of the model at work."""
    torch.manual_seed(0)
    model = Miniature(SMALL)
    for name, parameter in model.named_parameters():
        if "norm" in name or "res_proj" in name or name.endswith("A_log"):
            parameter.data += 0.3 * torch.randn_like(parameter)
        if "conv1d" not in name and not name.endswith(("A_log", "dt_bias", "o_norm.weight")):
            parameter.data = parameter.data.bfloat16().float()
    for router in model.routers():
        router.e_score_correction_bias.normal_(std=0.1)
    return model.eval()


@pytest.fixture(scope="module")
def checkpoint(model: Miniature, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model's checkpoint."""
    directory = tmp_path_factory.mktemp("miniature") / "checkpoint"
    export.export(model.state_dict(), SMALL, MERGES, directory)
    return directory


@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 200])
def test_logits_equal_the_reference(model: Miniature, checkpoint: Path, tokens: int) -> None:
    """A model that learns another function than the one served would answer nothing once exported."""
    ids = torch.randint(0, SMALL.vocab, (2, tokens), generator=torch.Generator().manual_seed(tokens))
    reference = ReferenceModel.load(checkpoint, weights="mxfp4")
    model.quantise(True)
    with torch.inference_mode():
        got = model(ids)
    for row in range(2):
        expected = reference.logits(ids[row].tolist())
        assert expected.std() > 0.1
        torch.testing.assert_close(got[row], expected, rtol=0, atol=2e-4)


def test_quantisation_is_seen_in_the_logits(model: Miniature, checkpoint: Path) -> None:
    """With the experts' own values the model differs, so the test above compares MXFP4 ones."""
    ids = torch.arange(100)[None]
    reference = ReferenceModel.load(checkpoint, weights="mxfp4").logits(ids[0].tolist())
    model.quantise(False)
    with torch.inference_mode():
        assert (model(ids)[0] - reference).abs().max() > 1e-2


def test_the_product_accepts_the_checkpoint(checkpoint: Path) -> None:
    """`kimi-k3 checkpoint show` must find every tensor in its place and none too many."""
    found = inspect_checkpoint(checkpoint)
    assert not found.problems
    tokens = json.loads((checkpoint / "config.json").read_text())
    special = vocabulary.special_tokens(len(MERGES))
    assert tokens["text_config"]["eos_token_id"] == special["<|end_of_msg|>"]
    assert tokens["text_config"]["vocab_size"] == vocabulary.VOCAB_SIZE


@settings(deadline=None)
@given(st.integers(0, 2**32), st.integers(-140, 120))
def test_training_rounds_as_the_bytes_do(seed: int, exponent: int) -> None:
    """Straight-through values and exported bytes come from two programs, and must be the same numbers."""
    random = np.random.default_rng(seed)
    weights = np.ldexp(random.standard_normal((4, 96), dtype=np.float32), exponent)
    weights[0, :32] = 0
    # Midpoints, where only the rule for ties decides.
    weights[1, :32] = np.ldexp(random.choice([0.25, 0.75, 1.25, 2.5, 3.5, 5, -5, 6, 7], 32), exponent)
    packed, scale = quantize_mxfp4(weights)
    if (scale == 0).any() and (weights[scale.repeat(32, axis=1) == 0] != 0).any():
        return  # below the smallest scale, which no trained weight is
    written = dequantize_mxfp4(torch.from_numpy(packed), torch.from_numpy(scale))
    assert torch.equal(mxfp4_values(torch.from_numpy(weights)), written)


def test_the_gradient_goes_straight_through() -> None:
    """Rounding has a gradient of zero almost everywhere, with which nothing would learn."""
    weights = torch.randn(3, 64, requires_grad=True)
    (through_mxfp4(weights) * 2).sum().backward()
    assert torch.equal(weights.grad, torch.full_like(weights, 2.0))  # type: ignore[arg-type]


@pytest.mark.parametrize("shift", [-8.0, 0.0, 8.0])
def test_scan_equals_the_recurrence(shift: float) -> None:
    """The chunked scan against the definition, from a gate that remembers all to one that forgets at once."""
    random = torch.Generator().manual_seed(0)
    q, k, v, raw = torch.randn(4, 3 * CHUNK, 2, 16, generator=random)
    q, k = forward.l2_norm(q), forward.l2_norm(k)
    decay = forward.kda_log_decay(4 * raw + shift, torch.zeros(2), torch.zeros(2, 16), -5.0)
    beta = torch.randn(3 * CHUNK, 2, generator=random).sigmoid()
    expected = forward.kda_recurrence(*(x.double() for x in (q, k, v, decay, beta)))
    got = kda_scan(*(x.transpose(0, 1)[None] for x in (q, k, v, decay, beta)))
    torch.testing.assert_close(got[0].transpose(0, 1).double(), expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("decay", [0.0, -5.0])
def test_scan_survives_the_gates_bounds(decay: float) -> None:
    """Values and gradients stay finite where the exponentials are largest, and with keys all alike."""
    k = torch.ones(1, 1, 2 * CHUNK, 16) / 4
    log_decay = torch.full_like(k, decay).requires_grad_()
    v = torch.randn(k.shape, generator=torch.Generator().manual_seed(0))
    beta = torch.full(k.shape[:3], 0.99)
    out = kda_scan(k, k, v, log_decay, beta)
    out.square().sum().backward()
    exact = forward.kda_recurrence(
        *(x[0].detach().transpose(0, 1).double() for x in (k, k, v, log_decay, beta))
    )
    torch.testing.assert_close(out[0].detach().transpose(0, 1).double(), exact, rtol=0, atol=1e-4)
    assert log_decay.grad is not None
    assert log_decay.grad.isfinite().all()


@settings(deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([1, 2, 8, 16, 64]))
def test_inverse_of_a_unit_triangle(seed: int, size: int) -> None:
    """By its definition, in float64."""
    below = torch.randn(2, size, size, generator=torch.Generator().manual_seed(seed)).double().tril(-1) / 4
    eye = torch.eye(size, dtype=torch.float64)
    got = inverse_of_unit_lower(below)
    torch.testing.assert_close(got @ (eye + below), eye.expand(2, -1, -1), rtol=0, atol=1e-9)


def test_routers_move_towards_an_even_load(model: Miniature) -> None:
    """An expert that is asked too often must lose bias, or a few would learn everything."""
    router = Miniature(SMALL).routers()[0]
    router.load = torch.tensor([9.0, 1.0, 1.0, 1.0, 0.0, 0.0])
    worst = router.balance(0.01)
    assert float(worst) == pytest.approx(9 / 2)
    assert router.e_score_correction_bias.sign().tolist() == [-1, 1, 1, 1, 1, 1]
    assert not router.load.any()


def test_a_few_steps_learn_and_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole path, train, save, export: the loss falls, both precisions are looked at, nothing is lost."""
    monkeypatch.setattr("examples.miniature.model.Sizes", lambda: SMALL)
    monkeypatch.setattr("sys.argv", [
        "train", "--out", str(tmp_path / "run"), "--steps", "10", "--tokens", "1024", "--held-out", "5",
        "--workers", "0", "--log-every", "1", "--no-compile", "--quantise-from", "0.5", "--rate", "0.01",
    ])  # fmt: skip
    train.train(train.parse())
    log = json.loads((tmp_path / "run" / "log.json").read_text())
    losses = [entry["loss"] for entry in log["loss"]]
    assert len(losses) == 10
    assert losses[-1] < losses[0]
    assert {look["mxfp4"] for look in log["held_out"]} == {True, False}
    state, sizes, merges = export.load_run(tmp_path / "run")
    assert sizes == SMALL
    tensors: dict[str, Tensor] = export.export(state, sizes, merges, tmp_path / "checkpoint")
    assert not inspect_checkpoint(tmp_path / "checkpoint").problems
    written = load_file(tmp_path / "checkpoint" / "model-00001-of-000001.safetensors")
    assert written.keys() == tensors.keys()
    assert sum(isinstance(module, Experts) for module in Miniature(sizes).modules()) == 4
