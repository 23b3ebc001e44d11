# SPDX-License-Identifier: Apache-2.0
"""The profiles that travel with the package, and what a profile may not say."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import resources
from typing import Any

import pytest
import yaml

from kimi_k3.errors import ExitCode, OperatorError
from kimi_k3.profiles.load import load_profile, parse_profile, profile_names

TEXT = (resources.files("kimi_k3.profiles") / "cpu-tiny.yaml").read_text()


def nodes(document: Any) -> Iterator[dict[str, Any]]:
    """Every mapping of the document."""
    if isinstance(document, dict):
        yield document
        for value in document.values():
            yield from nodes(value)


@pytest.mark.parametrize("name", profile_names())
def test_every_profile_is_valid(name: str) -> None:
    """A profile that does not load would be found by an operator."""
    assert load_profile(name).name == name


def test_an_unknown_profile_names_the_nearest() -> None:
    """A typing error is mended from the message alone."""
    with pytest.raises(OperatorError) as caught:
        load_profile("cpu_tiny")
    assert caught.value.exit_code is ExitCode.USAGE
    assert "did you mean 'cpu-tiny'?" in str(caught.value)


def test_a_path_is_not_a_profile() -> None:
    """Names are looked up, never joined to a path."""
    with pytest.raises(OperatorError):
        load_profile("../profiles/cpu-tiny")


def test_an_unknown_key_at_any_level_is_an_error() -> None:
    """A nested typing error must not pass as a setting (fosrl/helm-charts#37)."""
    count = len(list(nodes(yaml.safe_load(TEXT))))
    for index in range(count):
        document = yaml.safe_load(TEXT)
        list(nodes(document))[index]["surprise"] = {"value": "1", "why": "a reason that is long enough"}
        with pytest.raises(OperatorError, match="surprise"):
            parse_profile(yaml.safe_dump(document), name="cpu-tiny")


def test_every_key_is_required() -> None:
    """A profile is complete: nothing about a deployment is decided by a default out of sight."""
    for key in yaml.safe_load(TEXT):
        document = yaml.safe_load(TEXT)
        del document[key]
        with pytest.raises(OperatorError, match=key):
            parse_profile(yaml.safe_dump(document), name="cpu-tiny")


@pytest.mark.parametrize(
    ("old", "new", "part"),
    [
        ("name: cpu-tiny", "name: cpu-small", "must be the file's name"),
        ("  --enforce-eager:\n", "  --api-key:\n", "--api-key is refused"),
        ("  --enforce-eager:\n", "  --hf-token:\n", "--hf-token is refused"),
        ("  --enforce-eager:\n", "  --port:\n", "--port is written by the plan"),
        ("  HF_HUB_OFFLINE:\n", "  VLLM_API_KEY:\n", "VLLM_API_KEY is written by the plan"),
        ("  HF_HUB_OFFLINE:\n", "  KIMI_K3_WEIGHTS:\n", "KIMI_K3_WEIGHTS is written by the plan"),
        ("  HF_HUB_OFFLINE:\n", "  TORCHDYNAMO_DISABLE:\n", "given twice"),
        ("  seconds: 600", "  seconds: 0", "start_timeout: seconds must be more than 0"),
        ("weights: mxfp4", "weights: fp8", "weights"),
        ("    why: tracing made the first request take 14 s\n", "", "why"),
        ("flags:", "flags: [", "parsing"),
    ],
)
def test_what_a_profile_may_not_say(old: str, new: str, part: str) -> None:
    """One line that names the file, the place and the reason."""
    assert old in TEXT
    with pytest.raises(OperatorError) as caught:
        parse_profile(TEXT.replace(old, new), name="cpu-tiny")
    assert part in str(caught.value)
    assert "cpu-tiny.yaml" in str(caught.value)
    assert "\n" not in str(caught.value)
