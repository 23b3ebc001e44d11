# SPDX-License-Identifier: Apache-2.0
"""A profile on top of another: what is replaced, what is removed, and what is an error."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from kimi_k3.errors import OperatorError
from kimi_k3.profiles.inherit import OWN, merged
from kimi_k3.profiles.load import load_profile, parse_profile, profile_names

OWN_KEYS = {
    "schema_version": 1,
    "name": "mine",
    "extends": "ep8",
    "title": "a profile of a test",
    "summary": "a summary that is long enough",
    "verified": "unverified",
    "evidence": [],
}
FLAG = {"value": 32, "why": "a reason that is long enough"}


def text(**changes: Any) -> str:
    return yaml.safe_dump({**OWN_KEYS, **changes})


def refusal(document: str) -> str:
    with pytest.raises(OperatorError) as caught:
        parse_profile(document, name="mine")
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_what_is_not_said_is_inherited() -> None:
    """A reader of the result needs no second file."""
    mine, base = parse_profile(text(), name="mine"), load_profile("ep8")
    assert mine.flags == base.flags
    assert mine.environment == base.environment
    assert mine.start_timeout == base.start_timeout
    assert mine.extends == "ep8"


def test_an_entry_replaces_the_whole_entry() -> None:
    """The base's reason does not explain another value."""
    mine = parse_profile(text(flags={"--max-num-seqs": FLAG}), name="mine")
    assert mine.flags["--max-num-seqs"].value == 32
    assert mine.flags["--max-num-seqs"].why == FLAG["why"]
    assert "why" in refusal(text(flags={"--max-num-seqs": {"value": 32}}))


def test_null_removes_an_entry() -> None:
    """The only way to do without something that the base has."""
    mine = parse_profile(text(environment={"HSA_NO_SCRATCH_RECLAIM": None}), name="mine")
    assert "HSA_NO_SCRATCH_RECLAIM" not in mine.environment
    assert "HSA_NO_SCRATCH_RECLAIM" in load_profile("ep8").environment


def test_removing_what_is_not_there_is_an_error() -> None:
    """A typing error in a removal would leave the entry in place, silently."""
    assert "nothing to remove" in refusal(text(flags={"--max-num-seq": None}))


@pytest.mark.parametrize("changes", [{"expert_parallel": True}, {"flags": {"--enforce-eager": None}}])
def test_a_line_that_changes_nothing_is_an_error(changes: dict[str, Any]) -> None:
    """It reads like a difference, and stays behind when the base changes."""
    assert "remove" in refusal(text(**changes))


@pytest.mark.parametrize("name", sorted(set(OWN) - {"extends"}))
def test_what_a_profile_says_about_itself_is_not_inherited(name: str) -> None:
    """A base's evidence is not evidence for what was changed."""
    assert name in refusal(yaml.safe_dump({key: value for key, value in OWN_KEYS.items() if key != name}))


def test_one_level_is_the_limit() -> None:
    """Who reads a profile opens two files at most."""
    assert "ep8-long itself extends ep8" in refusal(text(extends="ep8-long"))
    assert "extend ep8" in refusal(text(extends="ep8-long"))


@pytest.mark.parametrize("base", ["ep9", "../ep8", 8, []])
def test_an_unknown_base(base: object) -> None:
    """Bases are looked up like profiles, by name, and the nearest one is told."""
    assert "extends: there is no profile" in refusal(text(extends=base))
    assert "'ep8'" in refusal(text(extends="ep9"))


def test_an_unknown_key_names_the_nearest() -> None:
    """As everywhere: mended from the message alone."""
    assert "did you mean 'expert_parallel'?" in refusal(text(experts_parallel=False))


def test_merging_leaves_its_arguments_alone() -> None:
    """A base is read once and extended many times."""
    base = {"flags": {"--a": 1, "--b": 2}, "title": "base"}
    assert merged(base, {"extends": "base", "flags": {"--a": None}})["flags"] == {"--b": 2}
    assert base == {"flags": {"--a": 1, "--b": 2}, "title": "base"}


@pytest.mark.parametrize("name", profile_names())
def test_a_base_extends_nothing(name: str) -> None:
    """The profiles that travel with the package keep the rule."""
    profile = load_profile(name)
    assert profile.extends is None or load_profile(profile.extends).extends is None
