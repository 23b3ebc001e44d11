# SPDX-License-Identifier: Apache-2.0
"""What changes while one looks: the event stream, acknowledgements, and a token."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect
from pydantic import SecretStr

from kimi_k3.journal.reader import Journal
from kimi_k3.sidecar.app import create_app
from kimi_k3.sidecar.settings import Settings
from tests.sidecar.builders import NOW, write
from tests.sidecar.serving import serving, wait_until

from . import scenes
from .conftest import Open
from .stub import Stub, warning
from .test_page import faults

Serve = Callable[..., AbstractContextManager[tuple[Stub, str]]]


@pytest.fixture
def stub() -> Serve:
    """A running :class:`Stub`, and its URL."""

    @contextlib.contextmanager
    def running(seen: Journal, **settings: Any) -> Iterator[tuple[Stub, str]]:
        told = Stub(seen, **settings)
        with serving(told.app()) as url:
            yield told, url
            told.cut()

    return running


def test_events_are_shown(stub: Serve, look: Open) -> None:
    """With a stream nothing is asked for but what it lacks, and each event is seen at once."""
    with stub(scenes.loading()) as (told, url):
        told.snapshot()
        with look(url) as page:
            expect(page.locator(".contact")).to_have_text("Live")
            expect(page.locator("#state-title")).to_contain_text("Loading 42 %")
            told.tell("startup", told.answers["/startupz"] | {"fraction": 0.5, "remaining_seconds": 65})
            expect(page.locator("#state-title")).to_have_text("Loading 50 % – about 1 min left")
            ranks = told.answers["/startupz"]["ranks"]
            ranks[3] |= {"bytes_done": ranks[3]["bytes_total"], "conversions_done": 7}
            told.tell("startup", told.answers["/startupz"])
            expect(page.locator("#ranks li").nth(3)).to_contain_text("Loaded 100 %")
            expect(page.locator("#error .facts")).to_contain_text("7 of 1,520")
            told.tell(
                "converted",
                {
                    "layer": 7,
                    "projection": "w2",
                    "relative_mse": 0.0123,
                    "max_error": 0.5,
                    "lossless_ratio": 0.25,
                    "ranks_done": 5,
                    "ranks_expected": 8,
                },
            )
            expect(page.locator("td[data-layer='7']").nth(1)).to_contain_text(
                "relative error 0.0123, largest 0.5, 25 % of groups exact, 5 of 8 ranks"
            )
            told.tell("unheard-of", {"some": "thing"})
            told.tell("warnings", {"warnings": [warning("lossy-weights", severity="critical")]})
            expect(page.locator("#warnings h3")).to_have_text("Critical This is lossy-weights.")
            asked = {path for _, path, _ in told.asked[-3:]}
            assert asked.isdisjoint({"/memory", "/warnings"})


def test_change_of_phase_brings_the_history(stub: Serve, look: Open) -> None:
    """The stream has no history; the page asks for it when the phase changes."""
    with stub(scenes.loading()) as (told, url):
        told.snapshot()
        with look(url) as page:
            expect(page.locator(".contact")).to_have_text("Live")
            expect(page.locator(".timeline .passed")).to_have_count(1)
            told.answers = Stub(scenes.converting()).answers
            told.snapshot()
            expect(page.locator(".timeline .passed")).to_have_count(2)
            expect(page.locator(".timeline .present")).to_contain_text("Converting")


def test_late_answer_is_older_than_the_stream(stub: Serve, look: Open) -> None:
    """What was asked before an event and answered after it does not take the page back."""
    with stub(scenes.loading()) as (told, url):
        told.held.add("/startupz")
        with look(url) as page:
            expect(page.locator(".contact")).to_have_text("Live")
            wait_until(lambda: any(path == "/startupz" for _, path, _ in told.asked))
            told.tell("startup", told.answers["/startupz"] | {"fraction": 0.77})
            expect(page.locator("#state-title")).to_contain_text("Loading 77 %")
            with page.expect_response("**/startupz"):
                told.held.clear()
            told.tell("warnings", {"warnings": [warning("later")]})
            expect(page.locator("#warnings")).to_contain_text("later")
            expect(page.locator("#state-title")).to_contain_text("Loading 77 %")


def test_stream_goes_on_where_it_was(stub: Serve, look: Open) -> None:
    """After a break the page says what it has read, and polls meanwhile."""
    with stub(scenes.loading()) as (told, url):
        told.snapshot()
        with look(url) as page:
            expect(page.locator(".contact")).to_have_text("Live")
            expect(page.locator("#memory")).to_be_visible()
            told.cut()
            wait_until(lambda: len(told.followers()) > 1)
            assert told.followers()[-1]["last-event-id"] == f"boot-{len(told.events)}"
            told.tell("startup", told.answers["/startupz"] | {"fraction": 0.77})
            expect(page.locator("#state-title")).to_contain_text("Loading 77 %")


def test_stream_ends_for_good(stub: Serve, look: Open) -> None:
    """A sidecar that has no stream any more is asked instead."""
    with stub(scenes.loading()) as (told, url):
        told.snapshot()
        with look(url) as page:
            expect(page.locator(".contact")).to_have_text("Live")
            told.streams = False
            told.cut()
            told.answers["/startupz"] |= {"fraction": 0.9}
            expect(page.locator("#state-title")).to_contain_text("Loading 90 %")
            expect(page.locator(".contact")).to_have_text("Live, asking every 2 s")


def test_hanging_sidecar(stub: Serve, look: Open) -> None:
    """A sidecar that takes requests and answers none is as good as dead, and is told so within seconds."""
    with stub(scenes.loading(), streams=False) as (_, url), look(url) as page:
        expect(page.locator("#state-title")).to_contain_text("Loading 42 %")
        page.route("**/*", lambda route: None)
        expect(page.locator("#state-title")).to_contain_text("No contact", timeout=25_000)
        page.unroute("**/*")
        expect(page.locator("#state-title")).to_contain_text("Loading 42 %", timeout=15_000)


def test_acknowledge(stub: Serve, look: Open) -> None:
    """A warning is acknowledged by name with the keyboard alone, and the name is remembered."""
    with stub(scenes.ready(), streams=False) as (told, url):
        told.answers["/warnings"]["warnings"] = [
            warning("lossy-weights"),
            warning("rank-missing", severity="critical", acknowledgeable=False),
        ]
        with look(url, width=390) as page:
            expect(page.locator("#warnings h2")).to_have_text("Warnings (2)")
            expect(page.locator("#warnings article").first).to_contain_text("rank-missing")
            expect(page.get_by_role("button", name="Acknowledge")).to_have_count(1)
            page.get_by_role("button", name="Acknowledge").press("Enter")
            expect(page.get_by_label("Your name")).to_be_focused()
            assert faults(page) == []
            page.keyboard.type("Ada <b>")
            page.evaluate("render()")
            page.keyboard.press("Tab")
            page.keyboard.type("seen at night")
            page.keyboard.press("Enter")
            row = page.locator("#matter-lossy-weights")
            expect(row).to_contain_text("Acknowledged by Ada <b>")
            expect(row).to_contain_text("seen at night")
            expect(row).to_be_focused()
            assert faults(page) == []
            page.get_by_role("button", name="Withdraw").click()
            page.get_by_role("button", name="Acknowledge").click()
            expect(page.get_by_label("Your name")).to_have_value("Ada <b>")
            page.get_by_role("button", name="Cancel").click()
            expect(page.get_by_role("button", name="Acknowledge")).to_be_focused()


def test_acknowledgement_refused(stub: Serve, look: Open) -> None:
    """What the sidecar says against it is shown where it was asked for, and nothing typed is lost."""
    with stub(scenes.ready(), streams=False) as (told, url):
        told.answers["/warnings"]["warnings"] = [warning("lossy-weights")]
        told.refuses = "this warning goes away by itself"
        with look(url) as page:
            page.get_by_role("button", name="Acknowledge").click()
            page.get_by_label("Your name").fill("Ada")
            page.get_by_label("Your name").press("Enter")
            expect(page.get_by_role("alert")).to_have_text("Not done: this warning goes away by itself.")
            expect(page.get_by_label("Your name")).to_have_value("Ada")


def test_token(stub: Serve, look: Open) -> None:
    """Without the token the state is shown all the same; with it everything, the stream included."""
    with stub(scenes.ready()) as (told, url):
        told.snapshot()
        told.token = "secret"
        with look(url) as page:
            expect(page.locator("#state-title")).to_have_text("Ready – traffic may come")
            assert faults(page) == []
            page.get_by_role("textbox", name="Token").fill("wrong")
            page.get_by_role("button", name="Unlock").click()
            expect(page.get_by_role("alert")).to_have_text("The sidecar does not accept this token.")
            page.get_by_role("textbox", name="Token").fill("secret")
            page.get_by_role("button", name="Unlock").click()
            expect(page.locator("#token")).to_have_count(0)
            expect(page.locator("h1")).to_have_text("kimi-k3")
            expect(page.locator(".contact")).to_have_text("Live")
            assert "secret" not in page.content()
            assert "secret" not in page.url
            page.reload()
            expect(page.locator("h1")).to_have_text("kimi-k3")


def test_real_acknowledgement(sidecar: Callable[[Journal], str], look: Open) -> None:
    """The sidecar keeps it: who opens the page later sees who knows of the matter."""
    url = sidecar(scenes.ready())
    with look(url) as page:
        page.get_by_role("button", name="Acknowledge").click()
        page.get_by_label("Your name").fill("Ada")
        page.get_by_label("Note").fill("agreed")
        page.get_by_label("Note").press("Enter")
        expect(page.locator("#matter-lossy-weights")).to_contain_text("Acknowledged by Ada")
    with look(url) as page:
        expect(page.locator("#matter-lossy-weights")).to_contain_text("Acknowledged by Ada")
        page.get_by_role("button", name="Withdraw").click()
        expect(page.get_by_role("button", name="Acknowledge")).to_be_visible()


def test_real_token(tmp_path: Path, look: Open) -> None:
    """The sidecar serves the page to everybody, and what it shows to those with the token."""
    write(tmp_path, scenes.loading())
    settings = Settings(state_dir=tmp_path, token=SecretStr("a-token-that-is-long-enough"))
    with serving(create_app(settings, clock=lambda: NOW)) as url, look(url) as page:
        page.get_by_role("textbox", name="Token").fill("a-token-that-is-long-enough")
        page.get_by_role("button", name="Unlock").click()
        expect(page.locator("h1")).to_have_text("kimi-k3")
        expect(page.locator(".contact")).to_have_text("Live")


@pytest.mark.parametrize("width", [1280, 390])
def test_planned_and_actual_memory(stub: Serve, look: Open, width: int) -> None:
    """The plan stands beside what was measured; what nobody measured is not in the bar."""
    with stub(scenes.ready(), streams=False) as (told, url), look(url, width=width) as page:
        row = page.locator("#memory .memory li").first
        expect(row).to_contain_text("Actual 201 of 256 GiB")
        expect(row).to_contain_text("weights 188 GiB, other 13 GiB, peak 214 GiB, free 55 GiB")
        expect(row).to_contain_text("Planned 228 GiB")
        expect(row).to_contain_text(
            "weights 190 GiB, one step of the model 8 GiB, KV cache 30 GiB, "
            "peak while loading 215 GiB, limit 243 GiB"
        )
        expect(page.locator("#memory .places li").first).to_contain_text("card1")
        expect(page.locator("#memory .places li").first).to_contain_text("Used 202 GiB of 256 GiB")
        expect(page.locator("#memory .keys")).to_have_text(
            "weightsone step of the modelKV cacheotherpeakplanned peak while loadinglimit of the plan"
        )
        assert page.evaluate("document.documentElement.scrollWidth") == width
        assert faults(page) == []
        assert told.followers()


def test_answers_of_another_version(stub: Serve, look: Open) -> None:
    """An answer that lacks what the page needs, or is no JSON object, leaves the rest of the page."""
    with stub(scenes.loading(), streams=False) as (told, url):
        told.answers["/memory"] = {}
        told.answers["/conversion"] = {"later": True}
        told.answers["/warnings"] = ["?"]
        with look(url) as page:
            expect(page.locator("#state-title")).to_contain_text("Loading 42 %")
            expect(page.locator("#ranks li")).to_have_count(8)
            expect(page.locator("#state .trouble")).to_contain_text("does not understand")
            expect(page.locator("#state .trouble")).to_contain_text("reload it")
