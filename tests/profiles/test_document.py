# SPDX-License-Identifier: Apache-2.0
"""``docs/profiles.md`` says what the profiles say."""

from __future__ import annotations

from pathlib import Path

from kimi_k3.profiles.document import profiles_document
from kimi_k3.profiles.load import load_profile, profile_names
from kimi_k3.profiles.schema import Flag, Variable

DOCUMENT = Path(__file__).parents[2] / "docs" / "profiles.md"


def test_the_document_is_that_of_the_profiles() -> None:
    """A document that is edited by hand, or not made anew, would drift from what is served."""
    made = "run `python -m kimi_k3.profiles.document docs/profiles.md`"
    assert DOCUMENT.read_text(encoding="utf-8") == profiles_document(), made


def test_every_reason_and_all_evidence_is_told() -> None:
    """Whoever chooses a profile reads one page."""
    text = profiles_document()
    for name in profile_names():
        profile = load_profile(name)
        entries: list[tuple[str, Flag | Variable]] = [*profile.flags.items(), *profile.environment.items()]
        assert all(
            each in text and " ".join(entry.why.split()).replace("|", "\\|") in text
            for each, entry in entries
        )
        assert all(" ".join(each.what.split()) in text and each.source in text for each in profile.evidence)
        assert all(" ".join(why.split()) in text for why in profile.left_open.values())


def test_what_cannot_be_started_is_said_in_table_and_section() -> None:
    """The first lines promise a command that would be refused."""
    text = profiles_document()
    waiting = [profile for profile in map(load_profile, profile_names()) if profile.not_startable]
    assert waiting
    assert text.count("| not yet: ") == text.count("cannot start it yet:**") == len(waiting)
    assert all(text.count(profile.not_startable or "") >= 2 for profile in waiting)


def test_links_lead_to_their_profiles() -> None:
    """GitHub makes an anchor of each heading."""
    text = profiles_document()
    for name in profile_names():
        assert f"[`{name}`](#{name})" in text
        assert f"\n## {name}\n" in text
