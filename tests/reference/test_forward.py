# SPDX-License-Identifier: Apache-2.0
"""What must hold of the reference forward by its mathematics, without an engine to compare it with."""

from __future__ import annotations

import dataclasses
import json
import shutil
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kimi_k3.checkpoint.tiny import make_tiny_checkpoint

from . import forward
from .forward import ReferenceModel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

PROMPT = [65 + 7 * i % 50 for i in range(40)]


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """One thread: the matrices are small and a fixed summation order lets tests compare bits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny checkpoint the engine tests serve."""
    directory = tmp_path_factory.mktemp("reference") / "tiny"
    make_tiny_checkpoint(directory, seed=0)
    return directory


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> ReferenceModel:
    """Its exact weights."""
    return ReferenceModel.load(checkpoint, weights="mxfp4")


def edited(source: Path, target: Path, edit: Callable[[dict[str, Tensor]], None]) -> Path:
    """A copy of the checkpoint ``source`` with ``edit`` applied to the tensors of each shard."""
    shutil.copytree(source, target)
    index = json.loads((target / "model.safetensors.index.json").read_text())
    index["weight_map"] = {}
    for shard in sorted(target.glob("*.safetensors")):
        tensors: dict[str, Tensor] = load_file(shard)
        edit(tensors)
        save_file(tensors, shard)
        index["weight_map"].update(dict.fromkeys(tensors, shard.name))
    (target / "model.safetensors.index.json").write_text(json.dumps(index))
    return target


def configured(source: Path, target: Path, **changes: Any) -> Path:
    """A copy of the checkpoint ``source`` with ``text_config`` changed."""
    shutil.copytree(source, target)
    document = json.loads((target / "config.json").read_text())
    document["text_config"].update(changes)
    (target / "config.json").write_text(json.dumps(document))
    return target


def kda_inputs(tokens: int, *, seed: int, shift: float) -> tuple[Tensor, ...]:
    """Random float64 inputs of the scan; ``shift`` moves the gate from remembering to forgetting."""
    random = torch.Generator().manual_seed(seed)
    q, k, v, raw = torch.randn(4, tokens, 2, 16, generator=random, dtype=torch.float64)
    decay = forward.kda_log_decay(4 * raw + shift, torch.zeros(2), torch.zeros(2, 16), -5.0)
    beta = torch.randn(tokens, 2, generator=random, dtype=torch.float64).sigmoid()
    return forward.l2_norm(q), forward.l2_norm(k), v, decay, beta


# ---------------------------------------------------------------- the whole model


@pytest.mark.parametrize("position", [0, 17, 39])
def test_causality(model: ReferenceModel, position: int) -> None:
    """A token reaches its own and later logits only; ``greedy`` with a draft stands on it."""
    changed = [*PROMPT[:position], PROMPT[position] + 1, *PROMPT[position + 1 :]]
    before, after = model.logits(PROMPT), model.logits(changed)
    torch.testing.assert_close(before[:position], after[:position], rtol=0, atol=1e-4)
    assert ((before - after)[position:].abs().amax(1) > 1e-2).all()


def test_prefix_gives_the_same_logits(model: ReferenceModel) -> None:
    """Greedy decoding compares forwards of different lengths, so length must not matter."""
    whole = model.logits(PROMPT)
    assert whole.shape == (len(PROMPT), model.config.vocab)
    assert whole.dtype == torch.float32
    for length in (1, 15, 16, 17):
        torch.testing.assert_close(model.logits(PROMPT[:length]), whole[:length], rtol=0, atol=1e-4)


def test_float32_is_close_to_float64(model: ReferenceModel, checkpoint: Path) -> None:
    """The engine computes in float32; a reference that loses digits would blame it for near ties."""
    exact = ReferenceModel.load(checkpoint, weights="mxfp4", dtype=torch.float64).logits(PROMPT)
    assert (model.logits(PROMPT) - exact).abs().max() < 1e-3


def test_greedy_is_the_chain_of_argmaxes(model: ReferenceModel) -> None:
    """Greedy decoding has this definition; everything else about ``greedy`` is speed."""
    tokens = list(PROMPT)
    for _ in range(6):
        tokens.append(int(model.logits(tokens)[-1].argmax()))
    assert model.greedy(PROMPT, 6) == tokens[len(PROMPT) :]
    assert model.greedy(PROMPT, 0) == []


@pytest.mark.parametrize(
    "spoil",
    [
        lambda right: right,
        lambda right: [*right[:3], right[3] + 1, *right[4:]],
        lambda right: right[1:],
        lambda right: [1] * 20,
        lambda right: right[:2],
    ],
    ids=["right", "one wrong", "shifted", "useless and long", "short"],
)
def test_a_draft_does_not_change_the_answer(
    model: ReferenceModel, spoil: Callable[[list[int]], list[int]]
) -> None:
    """The draft is the answer under test: were it believed, the comparison would prove nothing."""
    right = model.greedy(PROMPT, 8)
    assert model.greedy(PROMPT, 8, draft=spoil(right)) == right


def test_chunked_scan_leaves_the_logits_alone(model: ReferenceModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fast scan is an optimisation; the model is defined by the token-by-token recurrence."""
    fast = model.logits(PROMPT)
    monkeypatch.setattr(forward, "kda_scan", forward.kda_recurrence)
    torch.testing.assert_close(fast, model.logits(PROMPT), rtol=0, atol=1e-3)


def test_int4_weights_change_the_logits_and_are_reported(model: ReferenceModel, checkpoint: Path) -> None:
    """A mode that silently serves the exact weights, or the other rule, would pass as excellent."""
    mse = ReferenceModel.load(checkpoint, weights="int4-mse")
    amax = ReferenceModel.load(checkpoint, weights="int4-amax")
    for one, other in ((model, mse), (model, amax), (mse, amax)):
        assert (one.logits(PROMPT) - other.logits(PROMPT)).abs().max() > 1e-2
    assert not model.losses
    c = model.config
    assert len(mse.losses) == len(amax.losses) == (c.layers - c.dense_layers) * c.experts * 3
    total = [sum(loss.squared_error for loss in one.losses.values()) for one in (mse, amax)]
    assert total[0] < total[1] / 2


def test_int4_mse_is_exact_where_the_codes_allow_it(checkpoint: Path, tmp_path: Path) -> None:
    """Experts without 4 and 6 are representable, so the whole path must give the same bits."""

    def small_codes(tensors: dict[str, Tensor]) -> None:
        for name in tensors:
            if name.endswith("weight_packed"):
                # Clearing the second bit of a code with the third set turns 4 and 6 into 2 and 3.
                large = tensors[name] & 0x44
                tensors[name] = tensors[name] & ~(large >> 1)

    directory = edited(checkpoint, tmp_path / "small", small_codes)
    exact = ReferenceModel.load(directory, weights="mxfp4")
    int4 = ReferenceModel.load(directory, weights="int4-mse")
    assert torch.equal(exact.logits(PROMPT), int4.logits(PROMPT))
    assert all(loss.lossless == loss.groups for loss in int4.losses.values())


def test_layers_alternate_as_configured(model: ReferenceModel) -> None:
    """Off by one, every layer would still load if the two attentions had the same tensors."""
    kinds = [type(layer.attention) for layer in model.layers]
    assert [i + 1 for i, kind in enumerate(kinds) if kind is forward.LatentAttention] == [4, 8]
    assert [i for i, layer in enumerate(model.layers) if isinstance(layer.mlp, forward.Mlp)] == [0]
    assert [i for i, layer in enumerate(model.layers) if layer.opens_block] == [0, 3, 6]


def test_residual_bookkeeping(model: ReferenceModel) -> None:
    """Each read sees the closed blocks, oldest first, and the running sum; worked by hand for five layers.

    Blocks of three, contributions 1, 2, 4, ... so that a sum names its terms.
    """
    seen: list[list[float]] = []
    contributions = iter(2.0**i for i in range(100))

    class Read(forward.Residual):
        def __call__(self, sources: list[Tensor]) -> Tensor:
            seen.append([float(s.flatten()[0]) for s in sources])
            return sources[-1]

    def contribute(x: Tensor) -> Tensor:
        return torch.full_like(x, next(contributions))

    one = torch.ones(1)
    read = Read(one, one, one, 0.0)
    layers = [forward.Layer(i % 3 == 0, read, contribute, read, contribute) for i in range(5)]
    embedding = torch.full_like(model.embedding, 0.5)
    dataclasses.replace(model, embedding=embedding, layers=layers, output=read).hidden([0])
    first_block = 1 + 2 + 4 + 8 + 16 + 32
    assert seen == [
        [0.5],
        [0.5, 1],
        [0.5, 1 + 2],
        [0.5, 1 + 2 + 4],
        [0.5, 1 + 2 + 4 + 8],
        [0.5, 1 + 2 + 4 + 8 + 16],
        [0.5, first_block],
        [0.5, first_block, 64],
        [0.5, first_block, 64 + 128],
        [0.5, first_block, 64 + 128 + 256],
        [0.5, first_block, 64 + 128 + 256 + 512],
    ]


# ---------------------------------------------------------------- Kimi delta attention


@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 100])
@pytest.mark.parametrize("shift", [-8.0, 0.0, 8.0])
def test_scan_equals_a_loop_over_scalars(tokens: int, shift: float) -> None:
    """Both vectorised forms against the recurrence written with explicit sums, in float64."""
    q, k, v, decay, beta = kda_inputs(tokens, seed=tokens, shift=shift)
    expected = torch.zeros_like(v)
    for h in range(2):
        state = torch.zeros(16, 16, dtype=torch.float64)  # [V, K]
        for t in range(tokens):
            state = state @ torch.diag(decay[t, h].exp())
            state = state + beta[t, h] * torch.outer(v[t, h] - state @ k[t, h], k[t, h])
            expected[t, h] = state @ q[t, h]
    torch.testing.assert_close(forward.kda_recurrence(q, k, v, decay, beta), expected, rtol=0, atol=1e-13)
    torch.testing.assert_close(forward.kda_scan(q, k, v, decay, beta), expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("decay", [0.0, -5.0])
def test_scan_survives_a_saturated_gate_in_float32(decay: float) -> None:
    """At the gate's bounds the chunk's exponentials span 34 decades; nothing may overflow or vanish."""
    q, k, v, _, beta = (x.float() for x in kda_inputs(200, seed=1, shift=0.0))
    log_decay = torch.full_like(k, decay)
    got = forward.kda_scan(q, k, v, log_decay, beta)
    exact = forward.kda_recurrence(*(x.double() for x in (q, k, v, log_decay, beta)))
    torch.testing.assert_close(got.double(), exact, rtol=0, atol=1e-5)


def test_scan_refuses_a_decay_it_cannot_represent() -> None:
    """Beyond the published lower bound the chunked form would give infinities, not small numbers."""
    q, k, v, decay, beta = kda_inputs(4, seed=1, shift=0.0)
    with pytest.raises(ValueError, match="overflows"):
        forward.kda_scan(q, k, v, decay - 1.0, beta)


def test_delta_rule_overwrites_a_key() -> None:
    """With beta 1 and no decay, writing a key again replaces its value: that makes it a delta rule."""
    k = torch.eye(4)[[0, 1, 0]][:, None, :]
    v = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])[:, None, :]
    q = torch.eye(4)[[0, 0, 0]][:, None, :]
    out = forward.kda_scan(q, k, v, torch.zeros_like(k), torch.ones(3, 1))
    torch.testing.assert_close(out[:, 0], torch.tensor([[1.0, 2.0], [1.0, 2.0], [5.0, 6.0]]))


def test_decay_is_bounded() -> None:
    """The gate with a lower bound is ``bound * sigmoid(exp(A_log) * (raw + bias))``, not a softplus."""
    raw = torch.tensor([-1e4, 0.0, 1e4]).reshape(3, 1, 1)
    decay = forward.kda_log_decay(raw, torch.zeros(1), torch.zeros(1, 1), -5.0).flatten()
    assert decay.tolist() == [0.0, -2.5, -5.0]
    steep = forward.kda_log_decay(torch.zeros(1, 1, 1), torch.tensor([2.0]).log(), torch.ones(1, 1), -5.0)
    assert float(steep) == pytest.approx(-5 / (1 + 2.718281828459045**-2))


def test_convolution_taps() -> None:
    """The last tap meets the current token, and tokens before the sequence are zero."""
    x = torch.tensor([[1.0], [10.0], [100.0]])
    out = forward.short_convolution(x, torch.tensor([[0.0, 2.0, 3.0, 5.0]]))
    torch.testing.assert_close(out, torch.nn.functional.silu(torch.tensor([[5.0], [53.0], [532.0]])))


def test_delta_attention_of_one_token(model: ReferenceModel) -> None:
    """With an empty state the block reduces to a closed form that shows how its parts are wired."""
    kda, c = model.layers[0].attention, model.config
    assert isinstance(kda, forward.KdaAttention)
    x = torch.randn(c.hidden, generator=torch.Generator().manual_seed(0))
    silu = torch.nn.functional.silu
    q, k, v = (silu(kda.taps[n][:, -1] * (kda.project[n] @ x)).reshape(c.kda_heads, c.kda_dim) for n in "qkv")
    overlap = (q * k).sum(1) / q.norm(dim=1) / k.norm(dim=1) * c.kda_dim**-0.5
    read = ((kda.beta @ x).sigmoid() * overlap)[:, None] * v
    normed = read / (read.square().mean(1, keepdim=True) + 1e-5).sqrt() * kda.norm
    expected = kda.out @ (normed.flatten() * (kda.project["g"] @ x).sigmoid())
    torch.testing.assert_close(kda(x[None])[0], expected, rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------- latent attention


def test_latent_attention_of_one_token(model: ReferenceModel) -> None:
    """A token alone attends to itself fully, which leaves the value path and the output gate."""
    mla, c = model.layers[3].attention, model.config
    assert isinstance(mla, forward.LatentAttention)
    x = torch.randn(c.hidden, generator=torch.Generator().manual_seed(0))
    latent = (mla.kv_down @ x)[: c.kv_rank]
    latent = latent / (latent.square().mean() + c.eps).sqrt() * mla.kv_norm
    v = (mla.kv_up @ latent).reshape(c.heads, c.nope + c.v_dim)[:, c.nope :].flatten()
    expected = mla.out @ (v * (mla.gate @ x).sigmoid())
    torch.testing.assert_close(mla(x[None])[0], expected, rtol=1e-4, atol=1e-5)


def test_latent_attention_has_no_positions(model: ReferenceModel) -> None:
    """The rope channels are not rotated: shuffling the past leaves the last token's output alone."""
    attention = model.layers[3].attention
    assert isinstance(attention, forward.LatentAttention)
    x = torch.randn(20, model.config.hidden, generator=torch.Generator().manual_seed(0))
    shuffled = torch.cat([x[:19].flip(0), x[19:]])
    torch.testing.assert_close(attention(x)[19], attention(shuffled)[19], rtol=1e-4, atol=1e-5)
    assert (attention(x)[10] - attention(shuffled)[10]).abs().max() > 1e-2


def test_attention_equals_torch() -> None:
    """PyTorch's own attention is the obvious second opinion."""
    q, k, v = torch.randn(3, 30, 2, 8, generator=torch.Generator().manual_seed(0))
    expected = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), is_causal=True, scale=0.3
    )
    torch.testing.assert_close(forward.causal_attention(q, k, v, 0.3), expected.transpose(0, 1))


# ---------------------------------------------------------------- experts, residuals, activation


def test_bias_chooses_experts_without_weighing_them() -> None:
    """noaux_tc: the correction bias balances load and must not leak into the output."""
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    chosen, weights = forward.route(logits, torch.tensor([0.0, 0.0, 0.0, 9.0]), top_k=2, scale=2.5)
    assert sorted(chosen[0].tolist()) == [0, 3]
    by_expert = dict(zip(chosen[0].tolist(), weights[0].tolist(), strict=True))
    scores = logits.sigmoid()[0]
    assert by_expert[3] == pytest.approx(float(2.5 * scores[3] / (scores[0] + scores[3])))
    assert sum(by_expert.values()) == pytest.approx(2.5)


def test_moe_is_the_weighted_sum_of_all_experts(model: ReferenceModel) -> None:
    """Grouping tokens by expert is where a token gets another's weight; here each is computed alone."""
    moe = model.layers[1].mlp
    assert isinstance(moe, forward.LatentMoe)
    x = torch.randn(9, model.config.hidden, generator=torch.Generator().manual_seed(0))
    for token, got in zip(x, moe(x), strict=True):
        scores = (moe.gate @ token).sigmoid()
        best = (scores + moe.bias).argsort(descending=True)[: model.config.top_k]
        latent = moe.down @ token
        routed = sum(scores[e] / scores[best].sum() * moe.experts[e](latent) for e in best.tolist())
        assert moe.norm is not None
        normed = routed / (routed.square().mean() + model.config.eps).sqrt() * moe.norm
        torch.testing.assert_close(got, moe.shared(token) + moe.up @ normed, rtol=1e-4, atol=1e-5)


def test_situ_is_a_bounded_silu() -> None:
    """Near zero SiTU is ``silu(gate) * up``; far out it stops at beta times linear_beta."""
    small = torch.tensor([0.01, -0.02])
    near = forward.situ_and_mul(small, small, 4.0, 25.0)
    torch.testing.assert_close(near, torch.nn.functional.silu(small) * small, rtol=1e-4, atol=0)
    far = forward.situ_and_mul(torch.tensor([1e3, -1e3]), torch.tensor([1e4, 1e4]), 4.0, 25.0)
    assert far.tolist() == [100.0, 0.0]


def test_residual_mix_is_a_weighted_mean() -> None:
    """A blind scorer averages its sources, a sharp one picks one, and a lone source passes unchanged."""
    one, two = torch.tensor([[1.0, 1.0]]), torch.tensor([[4.0, -4.0]])
    norm = torch.ones(2)
    blind = forward.residual_mix([one, two], norm, torch.zeros(2), 1e-5)
    torch.testing.assert_close(blind, (one + two) / 2)
    sharp = forward.residual_mix([one, two], norm, torch.tensor([0.0, -100.0]), 1e-5)
    torch.testing.assert_close(sharp, two)
    assert torch.equal(forward.residual_mix([two], norm, torch.ones(2), 1e-5), two)


def test_residual_mix_scores_directions() -> None:
    """A long source gains no score by its length, and yet enters the mean with all of it."""
    one, two = torch.tensor([[3.0, 1.0]]), torch.tensor([[1.0, 3.0]])
    score = torch.tensor([0.3, -0.2])
    share = (one @ score - two @ score).div(5**0.5).sigmoid()
    got = forward.residual_mix([100 * one, two], torch.ones(2), score, 0.0)
    torch.testing.assert_close(got, share * 100 * one + (1 - share) * two)


# ---------------------------------------------------------------- the checkpoint


def test_unused_tensors_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    """A tensor nobody reads is a piece of the model left out."""

    def add(tensors: dict[str, Tensor]) -> None:
        tensors["language_model.model.layers.0.self_attn.novelty.weight"] = torch.zeros(1)

    directory = edited(checkpoint, tmp_path / "more", add)
    with pytest.raises(ValueError, match=r"novelty"):
        ReferenceModel.load(directory, weights="mxfp4")


def test_missing_and_misshapen_tensors_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    """Broadcasting would make a norm of one element work."""
    name = "language_model.model.norm.weight"

    def drop(tensors: dict[str, Tensor]) -> None:
        tensors.pop(name, None)

    def shrink(tensors: dict[str, Tensor]) -> None:
        if name in tensors:
            tensors[name] = tensors[name][:1].clone()

    with pytest.raises(KeyError, match=r"norm\.weight"):
        ReferenceModel.load(edited(checkpoint, tmp_path / "less", drop), weights="mxfp4")
    with pytest.raises(ValueError, match="expected"):
        ReferenceModel.load(edited(checkpoint, tmp_path / "short", shrink), weights="mxfp4")


def test_vectors_may_be_padded_or_four_dimensional(
    model: ReferenceModel, checkpoint: Path, tmp_path: Path
) -> None:
    """vLLM reads the first heads of a padded A_log and also its old [1, 1, H, 1] layout."""

    def old_layout(tensors: dict[str, Tensor]) -> None:
        for name in tensors:
            if name.endswith("A_log"):
                heads = model.config.kda_heads
                tensors[name] = tensors[name].flatten()[:heads].clone().reshape(1, 1, heads, 1)

    directory = edited(checkpoint, tmp_path / "old", old_layout)
    old = ReferenceModel.load(directory, weights="mxfp4")
    assert torch.equal(old.logits(PROMPT), model.logits(PROMPT))


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_act": "silu"},
        {"num_expert_group": 2},
        {"mla_use_nope": False},
        {"moe_router_activation_func": "softmax"},
        {"num_hidden_layers": 9},
    ],
)
def test_unimplemented_configurations_are_refused(
    checkpoint: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    """A truth that ignores a setting is a false witness."""
    with pytest.raises(NotImplementedError):
        ReferenceModel.load(configured(checkpoint, tmp_path / "other", **changes), weights="mxfp4")
