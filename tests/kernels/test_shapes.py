# SPDX-License-Identifier: Apache-2.0
"""Which shapes AITER will be asked for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kimi_k3.errors import ExitCode, OperatorError
from kimi_k3.kernels.shapes import moe_shapes, padded_size, padded_sizes, require_int4_on_gfx942
from kimi_k3.plan.compose import parallelism
from kimi_k3.profiles.load import load_profile, profile_names
from kimi_k3.profiles.schema import Architecture, Profile
from kimi_k3.words.weights import Weights

from ..checkpoint.imitation import published_config

TEXT = published_config().text_config
INT4 = [
    name
    for name in profile_names()
    if (profile := load_profile(name)).weights is Weights.INT4
    and profile.gpu is not None
    and profile.gpu.architecture is Architecture.GFX942
]


def require_the_whole_model(profile: Profile) -> None:
    """All ranks together hold each expert's whole width once."""
    shapes, cut = moe_shapes(TEXT, profile), parallelism(profile)
    for shape in shapes:
        assert shape.model_dim == TEXT.expert_hidden
        assert shape.topk == TEXT.num_experts_per_token
    slices = 1 if cut.expert else cut.expert_ranks
    (inter_dim,) = {shape.inter_dim for shape in shapes}
    assert inter_dim * slices >= TEXT.moe_intermediate_size
    assert inter_dim * slices - TEXT.moe_intermediate_size < 128 * slices or inter_dim == 256
    if not cut.expert:
        assert [shape.experts for shape in shapes] == [TEXT.num_experts]
        return
    least = TEXT.num_experts // cut.expert_ranks
    rest = TEXT.num_experts - least * cut.expert_ranks
    held = {shape.experts for shape in shapes}
    assert held == ({least, least + 1} - {0} if rest else {least})
    assert rest * (least + 1) + (cut.expert_ranks - rest) * least == TEXT.num_experts


@pytest.mark.parametrize("name", INT4)
def test_sizes_multiply_up_to_the_model(name: str) -> None:
    """A shape that is not a whole part of the model is one that no rank has."""
    require_the_whole_model(load_profile(name))


@given(tensor=st.sampled_from([1, 2, 4, 8]), data=st.sampled_from([1, 2, 3, 5, 8, 16]), expert=st.booleans())
def test_any_cut(tensor: int, data: int, expert: bool) -> None:
    """Also where 896 experts do not divide evenly and ranks differ."""
    base = load_profile("dp-ep16")
    document = base.model_dump() | {
        "nodes": 16 * tensor,
        "tensor_parallel_size": tensor,
        "data_parallel_size": data,
        "data_parallel_size_local": 1,
        "expert_parallel": expert,
    }
    require_the_whole_model(Profile.model_construct(**{**dict(base), **document, "flags": base.flags}))


def test_the_published_layouts() -> None:
    """Those that AITER's table for Kimi-K3 has rows for."""
    (ep8,), (tp8,) = (moe_shapes(TEXT, load_profile(name)) for name in ("ep8", "tp8"))
    assert (ep8.model_dim, ep8.inter_dim, ep8.experts, ep8.topk, ep8.masked) == (3584, 3072, 112, 16, True)
    assert (tp8.model_dim, tp8.inter_dim, tp8.experts, tp8.topk, tp8.masked) == (3584, 384, 896, 16, False)
    assert ep8.tokens == tuple(1 << power for power in range(13))


def test_data_parallel_engines_share_their_tokens() -> None:
    """Each rank computes with its experts for the tokens of all eight engines."""
    (shape,) = moe_shapes(TEXT, load_profile("dp-ep16"))
    assert (shape.experts, shape.tokens[-1]) == (56, 8 * 2048)


@given(st.integers(min_value=1, max_value=1 << 20))
def test_every_step_has_its_size(tokens: int) -> None:
    """As get_padded_M of aiter/fused_moe.py: the next power of two, from 32768 on a tier."""
    size = padded_size(tokens)
    if tokens < 32768:
        assert size >= tokens > size // 2
    else:
        assert size == (131072 if tokens >= 131072 else 32768)
    assert size in padded_sizes(tokens)
    steps = (min(tokens, each) for each in (*(1 << power for power in range(18)), tokens))
    assert padded_sizes(tokens) == tuple(sorted({padded_size(each) for each in steps}))


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("cpu-tiny", "runs on a CPU"),
        ("mi355x-native", "is for gfx950"),
        ("mxfp4-emulation", "serves mxfp4"),
    ],
)
def test_profiles_without_such_kernels(name: str, why: str) -> None:
    """Refused with a line that says why."""
    with pytest.raises(OperatorError, match=f"--profile {name}: {why}; kernels are") as caught:
        require_int4_on_gfx942(load_profile(name))
    assert caught.value.exit_code is ExitCode.USAGE


def test_a_profile_without_a_size_of_steps() -> None:
    """Nothing to guess from."""
    profile = load_profile("ep8").model_copy(update={"flags": {}})
    with pytest.raises(OperatorError, match="sets no --max-num-batched-tokens"):
        moe_shapes(TEXT, profile)
