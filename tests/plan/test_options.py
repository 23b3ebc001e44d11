# SPDX-License-Identifier: Apache-2.0
"""From the command line's values to a decided deployment, and the consent to lossy weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kimi_k3.errors import ExitCode, OperatorError
from kimi_k3.plan.consent import require_consent
from kimi_k3.plan.launch import Deployment, profile_flags
from kimi_k3.plan.options import Options, decide, requantisation
from kimi_k3.plan.startable import require_startable
from kimi_k3.profiles.load import load_profile
from kimi_k3.words.weights import ConsentSource, ScaleRule, Weights

OPTIONS = Options(checkpoint=Path("/k3"), host="127.0.0.1", port=8000, served_model_name="kimi-k3")


def decided(
    options: Options,
    *,
    profile: str = "cpu-tiny",
    consent: bool = False,
    guarded: bool = False,
    state_dir: Path = Path("/state"),
) -> Deployment:
    return decide(
        options,
        load_profile(profile),
        state_dir=state_dir,
        socket_dir=Path("/tmp/kimi-k3-start"),
        start_id="s1",
        consent_in_environment=consent,
        guarded=guarded,
    )


def test_the_profile_decides_what_the_operator_leaves_open() -> None:
    """A bare ``kimi-k3 serve DIR`` is a complete deployment."""
    deployment = decided(OPTIONS)
    assert deployment.weights is Weights.MXFP4
    assert deployment.tensor_parallel_size == 1
    assert deployment.start_timeout == 600
    assert not deployment.expert_parallel


@pytest.mark.parametrize("name", ["mxfp4-emulation", "mi355x-native"])
def test_a_lossless_profile_stays_lossless(name: str) -> None:
    """vLLM ignores a request for int4 where it cannot compute with it, and would serve something else."""
    options = replace(OPTIONS, weights="int4")
    with pytest.raises(OperatorError, match=f"profile {name} is for experts as they are") as caught:
        decided(options, profile=name)
    assert caught.value.exit_code is ExitCode.USAGE
    assert "--profile ep8" in str(caught.value)
    assert decided(OPTIONS, profile=name).weights is Weights.MXFP4


def test_what_one_start_cannot_say_yet() -> None:
    """Left out silently, the start would be another deployment, or fail after an hour of loading."""
    with pytest.raises(OperatorError) as caught:
        require_startable(load_profile("ep8-dspark"))
    assert "a draft" in str(caught.value)
    assert "e.g. --profile ep8" in str(caught.value)
    assert caught.value.exit_code is ExitCode.USAGE


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"max_num_seqs": 512}, "--max-num-seqs 512: must be at most 256"),
        ({"tensor_parallel_size": 4}, "--tensor-parallel-size 4: 4 x 1 x 1 ranks"),
        ({"expert_parallel": False}, "--no-expert-parallel: --enable-ep-weight-filter has no effect"),
        ({"dtype": "float32"}, "--dtype float32: "),
    ],
)
def test_the_profiles_rules_hold_for_an_operators_choices(change: dict[str, Any], part: str) -> None:
    """512 requests ran out of memory on MI325X (case 29), whoever asks for them."""
    with pytest.raises(OperatorError) as caught:
        decided(replace(OPTIONS, **change), profile="ep8", consent=True)
    assert part in str(caught.value)
    assert caught.value.exit_code is ExitCode.USAGE


@pytest.mark.parametrize("name", ["ep8", "tp8", "ep8-long"])
def test_gpus_serve_int4_only_with_consent(name: str) -> None:
    """The profile asks for int4; it does not consent for the operator."""
    with pytest.raises(OperatorError) as caught:
        decided(OPTIONS, profile=name)
    assert caught.value.exit_code is ExitCode.CONSENT
    assert decided(OPTIONS, profile=name, consent=True).weights is Weights.INT4


def test_a_drain_of_zero_is_a_choice() -> None:
    """0 means to abort requests at once; it must not fall back to the profile's."""
    assert decided(replace(OPTIONS, drain_timeout=0.0)).drain_timeout == 0


def test_a_key_is_known_to_the_plan_without_being_in_it() -> None:
    """That there is one changes how vLLM is started."""
    assert decided(OPTIONS, guarded=True).guarded
    assert not decided(OPTIONS).guarded


def test_a_state_directory_that_a_symlink_made_unwritable_as_text() -> None:
    """The path is resolved after the command line was checked; the journal could not hold it."""
    with pytest.raises(OperatorError, match="not UTF-8") as caught:
        decided(OPTIONS, state_dir=Path("/state\udcff"))
    assert caught.value.exit_code is ExitCode.USAGE


def test_the_largest_values_pass() -> None:
    """A bound is part of what is promised."""
    most = replace(
        OPTIONS,
        tensor_parallel_size=1024,
        max_model_len=2**31 - 1,
        max_num_seqs=65536,
        start_timeout=7 * 86400.0,
        drain_timeout=7 * 86400.0,
    )
    assert profile_flags(decided(most))["--max-model-len"] == str(2**31 - 1)


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"weights": "int5"}, "did you mean 'int4'?"),
        ({"weights": "fp8"}, "use one of int4, mxfp4"),
        ({"weights": "int4", "scale_rule": "msee"}, "did you mean 'mse'?"),
        ({"scale_rule": "mse"}, "--scale-rule has no effect with weights mxfp4"),
        ({"negative_scale": False}, "--no-negative-scale has no effect with weights mxfp4"),
        ({"allow_nonfinite": True}, "--allow-nonfinite has no effect with weights mxfp4"),
        (
            {"weights": "int4", "scale_rule": "amax", "negative_scale": False},
            "--no-negative-scale has no effect with --scale-rule amax",
        ),
        ({"dtype": "bf16"}, "did you mean 'bfloat16'?"),
        ({"port": 0}, "1 to 65535"),
        ({"port": 65536}, "1 to 65535"),
        ({"tensor_parallel_size": 0}, "--tensor-parallel-size 0"),
        ({"max_model_len": -1}, "--max-model-len -1"),
        ({"max_num_seqs": 0}, "--max-num-seqs 0"),
        ({"start_timeout": 0.0}, "more than 0"),
        ({"start_timeout": float("nan")}, "--start-timeout nan"),
        ({"drain_timeout": -1.0}, "0 or more"),
        ({"drain_timeout": float("inf")}, "--drain-timeout inf"),
        ({"served_model_name": "--port"}, "--served-model-name"),
        ({"served_model_name": "two words"}, "--served-model-name"),
        ({"host": ""}, "--host"),
        ({"host": "h\udcff"}, "not UTF-8"),
        ({"served_model_name": "k\udcff"}, "not UTF-8"),
        ({"checkpoint": Path("/k\udcff")}, "not UTF-8"),
        ({"start_timeout": 1e10}, "at most 604800 (7 days)"),
        ({"drain_timeout": 604801.0}, "at most 604800 (7 days)"),
        ({"tensor_parallel_size": 1025}, "1 to 1024"),
        ({"max_model_len": 2**31}, "1 to 2147483647"),
        ({"max_num_seqs": 65537}, "1 to 65536"),
    ],
)
def test_an_impossible_value_is_named_with_the_nearest_possible_one(
    change: dict[str, Any], part: str
) -> None:
    """vLLM would find it too, after its imports, and in a page of text."""
    with pytest.raises(OperatorError) as caught:
        decided(replace(OPTIONS, **change))
    assert part in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code is ExitCode.USAGE


@pytest.mark.parametrize(
    ("weights", "flag", "environment", "source"),
    [
        (Weights.MXFP4, False, False, None),
        (Weights.MXFP4, True, True, None),
        (Weights.INT4, True, False, ConsentSource.FLAG),
        (Weights.INT4, True, True, ConsentSource.FLAG),
        (Weights.INT4, False, True, ConsentSource.ENVIRONMENT),
    ],
)
def test_where_consent_comes_from(
    weights: Weights, flag: bool, environment: bool, source: ConsentSource | None
) -> None:
    """The journal records who consented; lossless weights need nobody."""
    asked = requantisation("--rule", "mse", negative_scale=True, allow_nonfinite=False)
    lossy = asked if weights.lossy else None
    assert require_consent(lossy, flag=flag, environment=environment) is source


@pytest.mark.parametrize(("rule", "figure"), [(ScaleRule.MSE, "0.004"), (ScaleRule.AMAX, "0.011")])
def test_without_consent_the_loss_is_spelled_out(rule: ScaleRule, figure: str) -> None:
    """Nobody can consent to what they are not told: what is lossy, how much, and what is not."""
    asked = requantisation("--rule", rule, negative_scale=True, allow_nonfinite=False)
    with pytest.raises(OperatorError) as caught:
        require_consent(asked, flag=False, environment=False)
    text = str(caught.value)
    assert caught.value.exit_code is ExitCode.CONSENT
    for part in ("routed experts", "one bf16 scale per 32", figure, "/conversion", "--weights mxfp4"):
        assert part in text
    assert "\n" not in text
