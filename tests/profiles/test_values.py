# SPDX-License-Identifier: Apache-2.0
"""What value each flag takes, held against the profiles and against vLLM's own parser."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from kimi_k3.profiles.load import load_profile, profile_names
from kimi_k3.profiles.values import CHOICES, COUNTS, MOST, SHARES, SWITCHES, VALUED, wrong_value

LIST = """
import json
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
options = make_arg_parser(FlexibleArgumentParser())._option_string_actions
print(json.dumps({
    name: {"valued": action.nargs != 0, "choices": list(action.choices) if action.choices else None}
    for name, action in options.items()
}))
"""


def test_every_flag_of_a_profile_is_known() -> None:
    """What --set may change is any of these, and one without a kind would pass with any value."""
    flags = {flag for name in profile_names() for flag in load_profile(name).flags}
    assert flags == SWITCHES | VALUED
    assert not SWITCHES & VALUED


@pytest.mark.parametrize("name", sorted(VALUED))
def test_a_flag_that_needs_a_value(name: str) -> None:
    """vLLM's parser would take the next flag for it."""
    assert wrong_value(name, None) == f"{name}: needs a value; give one"


@pytest.mark.parametrize("name", sorted(SWITCHES))
def test_a_switch_takes_no_value(name: str) -> None:
    """vLLM's parser would complain of a stray argument."""
    assert wrong_value(name, None) is None
    assert "is a switch" in str(wrong_value(name, 1))


@pytest.mark.parametrize(
    ("value", "right"), [(1, True), (MOST, True), (0, False), (MOST + 1, False), ("1", False)]
)
def test_counts(value: int | str, right: bool) -> None:
    """A count that is none, or overflows on its way."""
    assert all((wrong_value(name, value) is None) is right for name in COUNTS)


@pytest.mark.parametrize(("value", "right"), [(1, True), (0.5, True), (10**400, False), ("nan", False)])
def test_shares(value: int | float | str, right: bool) -> None:
    """Bounds are a rule of devices; that it is a number is not."""
    assert all((wrong_value(name, value) is None) is right for name in SHARES)


def test_an_object_that_is_too_deep() -> None:
    """A parser that gives up is an operator's error, too."""
    assert "must be a JSON object" in str(wrong_value("--compilation-config", "[" * 100_000))
    assert wrong_value("--compilation-config", '{"mode": 3}') is None


@pytest.mark.engine
def test_the_installed_vllm_takes_these_values() -> None:
    """A choice that vLLM refuses would be found after its imports; a kind that is wrong, never."""
    pytest.importorskip("vllm.version", reason="vLLM is not installed")
    done = subprocess.run([sys.executable, "-c", LIST], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    options = json.loads(done.stdout.splitlines()[-1])
    assert [name for name in sorted(SWITCHES | VALUED) if options[name]["valued"] is (name in SWITCHES)] == []
    for name, choices in CHOICES.items():
        known = options[name]["choices"]
        assert known is None or set(choices) <= set(known), name
