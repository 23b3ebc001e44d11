# SPDX-License-Identifier: Apache-2.0
"""The page over a real sidecar, in a real browser."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, expect

from kimi_k3.journal.reader import Journal
from kimi_k3.sidecar.app import create_app
from kimi_k3.sidecar.settings import Settings
from tests.sidecar.builders import NOW, journal, lossy_rank, rank, supervisor, write
from tests.sidecar.serving import serving

from . import scenes
from .conftest import Open

Sidecar = Callable[[Journal], str]

SHOWN = {
    "loading": (
        "Loading 42 %",
        ["about 11 min left", "8 of 8 ranks report; the slowest is rank 5 with 31 %.", "644 of 1,453 GiB"],
    ),
    "converting": ("Converting 49 %", ["about 1 min left", "96 of 190", "754 of 1,520"]),
    "ready": ("Ready", ["traffic may come", "highest 0.021 at layer 61 w2", "8 tokens in 0.8 s"]),
    "failed": (
        "Failed",
        ["Out of device memory while profiling.", "lower --gpu-memory-utilization", "Rank 3 ran out of"],
    ),
    "again": (
        "Loading 42 %",
        [
            "Why the start before failed",
            "Out of device memory while profiling.",
            "lower --gpu-memory-utilization",
            "It had reached: Compiling. Exit code 71",
        ],
    ),
    "stale": (
        "Not reporting",
        [
            "stale: last heard from 4",
            "Then it was: Loading 42 %.",
            "The supervisor has stopped reporting",
        ],
    ),
    "lossless": ("Ready", ["nothing is converted", "mxfp4", "None."]),
}


def settled(page: Page, title: str) -> None:
    """Wait until the page has read everything that it will show."""
    expect(page.locator("#state-title")).to_contain_text(title)
    for card in ("state", "warnings", "ranks", "error", "memory"):
        expect(page.locator(f"#{card}")).to_be_visible()


def faults(page: Page) -> list[str]:
    """What axe finds, in short."""
    found = Axe().run(page, options={"resultTypes": ["violations"]}).response["violations"]
    return [f"{one['id']}: {node['html'][:120]}" for one in found for node in one["nodes"]]


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("name", SHOWN)
def test_scene(sidecar: Sidecar, look: Open, name: str, width: int) -> None:
    """An operator sees what is going on, on a desk and on a phone, with any eyes."""
    title, texts = SHOWN[name]
    # Each scene is looked at in both schemes, once; axe takes seconds.
    scheme = "light" if width == 1280 else "dark"
    url = sidecar(getattr(scenes, name)())
    with look(url, width=width, color_scheme=scheme, reduced_motion="reduce") as page:
        settled(page, title)
        for text in texts:
            expect(page.locator("body")).to_contain_text(text)
        assert page.title().startswith(title)
        assert page.evaluate("document.documentElement.scrollWidth") == width
        page.set_viewport_size({"width": 320, "height": 640})
        assert page.evaluate("document.documentElement.scrollWidth") == 320
        page.set_viewport_size({"width": width, "height": 844})
        assert faults(page) == []


@pytest.mark.parametrize("world_size", [1, 16])
@pytest.mark.parametrize("width", [1280, 390])
def test_world_sizes(sidecar: Sidecar, look: Open, width: int, world_size: int) -> None:
    """One GPU and two nodes of eight look right, too."""
    with look(sidecar(scenes.converting(world_size)), width=width) as page:
        settled(page, "Converting")
        expect(page.locator("#ranks li")).to_have_count(world_size)
        assert page.evaluate("document.documentElement.scrollWidth") == width


def test_empty_directory(sidecar: Sidecar, look: Open) -> None:
    """Before a supervisor has reported, the page says so, and shows dashes instead of zeros."""
    with look(sidecar(journal(None))) as page:
        expect(page.locator("#state-title")).to_have_text("Nothing has reported")
        expect(page.locator("#state")).to_contain_text("no supervisor.json")
        expect(page.locator("#banner dd").first).to_have_text("–")
        expect(page.locator("#warnings")).to_contain_text("supervisor-missing")
        assert faults(page) == []


def test_unknown_is_not_zero(sidecar: Sidecar, look: Open) -> None:
    """A rank that said nothing, or measured nothing, has no 0 % and no 0 B."""
    seen = journal(scenes.loading().supervisor, rank(0), lossy_rank(1, conversions=()))
    with look(sidecar(seen)) as page:
        settled(page, "Loading")
        expect(page.locator("#state-title")).to_have_text("Loading")
        rows = page.locator("#ranks li")
        expect(rows.nth(1)).to_contain_text("Loaded – not measured")
        expect(rows.nth(7)).to_contain_text("has not reported")
        expect(page.locator("#memory li").first).to_contain_text("Actual – not measured")


def test_changes_arrive(sidecar: Sidecar, look: Open) -> None:
    """News comes by the event stream; a screen reader hears of the phase, not of each percent."""
    with look(sidecar(scenes.loading())) as page:
        settled(page, "Loading 42 %")
        expect(page.locator(".contact")).to_have_text("Live")
        expect(page.locator("#announcer")).to_have_text("Loading")
        sidecar(scenes.converting())
        expect(page.locator("#state-title")).to_contain_text("Converting 49 %")
        expect(page.locator("#announcer")).to_have_text("Converting")
        expect(page.locator(".timeline .present")).to_contain_text("Converting")
        expect(page.locator("#error")).to_contain_text("754 of 1,520")


def test_new_start_forgets_the_old(sidecar: Sidecar, look: Open) -> None:
    """Errors of an earlier start's conversion must not stand on the map of the present one."""
    with look(sidecar(scenes.ready())) as page:
        settled(page, "Ready")
        expect(page.locator(".cell.done").first).to_be_attached()
        fresh = scenes.loading()
        assert fresh.supervisor is not None
        again = [one.model_copy(update={"start_id": "next"}) for one in fresh.ranks]
        sidecar(journal(fresh.supervisor.model_copy(update={"start_id": "next"}), *again))
        expect(page.locator("#state-title")).to_contain_text("Loading")
        expect(page.locator("#error")).to_contain_text("0 of 1,520")
        expect(page.locator("#error")).to_contain_text("No layer has been converted yet.")
        expect(page.locator(".maps .cell.done")).to_have_count(0)


def test_dead_sidecar(tmp_path: Path, look: Open) -> None:
    """What is old is never shown as if it were so now."""
    write(tmp_path, scenes.loading())
    app = create_app(Settings(state_dir=tmp_path, poll_seconds=0.1), clock=lambda: NOW)
    with serving(app) as url, look(url) as page:
        settled(page, "Loading 42 %")
        page.route("**/*", lambda route: route.abort())
        expect(page.locator("#state-title")).to_have_text(
            re.compile("No contact.*does not answer, last heard from \\d+ s ago"), timeout=15_000
        )
        expect(page.locator("#state")).to_contain_text("Then it was: Loading 42 %.")
        expect(page.locator(".contact")).to_have_text("No contact")
        expect(page.locator("#announcer")).to_have_text("No contact")
        expect(page.locator(".left")).to_have_count(0)
        assert page.title().startswith("No contact")
        assert faults(page) == []
        page.unroute("**/*")
        expect(page.locator("#state-title")).to_contain_text("Loading 42 %", timeout=15_000)


def test_never_heard(look: Open, tmp_path: Path) -> None:
    """A page out of the cache whose sidecar is gone claims nothing."""
    with serving(create_app(Settings(state_dir=tmp_path, poll_seconds=0.1))) as url, look(url) as page:
        page.route(re.compile("/[a-z]+$"), lambda route: route.abort())
        page.reload()
        expect(page.locator("#state-title")).to_contain_text("No contact")
        expect(page.locator("#state-title")).to_contain_text("never heard from")


def test_names_stay_text(sidecar: Sidecar, look: Open) -> None:
    """What a checkpoint, a flag or a log says must not become part of the page."""
    evil = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
    seen = scenes.failed()
    assert seen.supervisor is not None
    assert seen.supervisor.ending is not None
    ending = seen.supervisor.ending.model_copy(update={"reason": evil})
    record = seen.supervisor.model_copy(update={"served_model_name": evil, "profile": evil, "ending": ending})
    told = seen.failures[0].model_copy(update={"what": evil, "remedy": evil})
    with look(sidecar(journal(record, *seen.ranks, failures=(told,)))) as page:
        settled(page, "Failed")
        expect(page.locator("h1")).to_have_text(evil)
        expect(page.locator("#failures")).to_contain_text(evil)
        assert page.locator("img").count() == 0
        assert "owned" not in page.title().replace(evil, "")
        assert page.evaluate("document.documentElement.scrollWidth") == 1280


def test_map_by_keyboard(sidecar: Sidecar, look: Open) -> None:
    """Every number of the map can be had without a mouse, and the place is kept while news arrives."""
    with look(sidecar(scenes.ready()), width=390) as page:
        settled(page, "Ready")
        grid = page.locator("table.map").nth(1)
        expect(page.locator(".readout").nth(1)).to_contain_text("Layer 61: relative error 0.021")
        grid.locator("td[tabindex='0']").focus()
        for key, layer in (("ArrowRight", 62), ("ArrowDown", 74), ("ArrowUp", 62), ("Home", 0), ("End", 95)):
            page.keyboard.press(key)
            expect(page.locator(".readout").nth(1)).to_contain_text(f"Layer {layer}:")
        page.evaluate("render()")
        assert page.evaluate("document.activeElement.dataset.layer") == "95"
        expect(grid.locator("td[tabindex='0']")).to_have_count(1)


def test_map_by_mouse(sidecar: Sidecar, look: Open) -> None:
    """Pointing at a cell tells its figures."""
    with look(sidecar(scenes.converting())) as page:
        settled(page, "Converting")
        page.locator("td[data-layer='48']").first.hover()
        expect(page.locator(".readout").first).to_contain_text("Layer 48: relative error")
        expect(page.locator(".readout").first).to_contain_text("3 of 8 ranks")
        page.locator("td[data-layer='60']").first.hover()
        expect(page.locator(".readout").first).to_have_text("Layer 60: not converted yet")


def test_keyboard_reaches_the_state(sidecar: Sidecar, look: Open) -> None:
    """The first stop of the Tab key skips to what one came for."""
    with look(sidecar(scenes.loading())) as page:
        settled(page, "Loading")
        page.keyboard.press("Tab")
        expect(page.locator(".skip")).to_be_focused()
        page.keyboard.press("Enter")
        expect(page.locator("#state")).to_be_focused()


def test_reduced_motion(sidecar: Sidecar, look: Open) -> None:
    """Who wants stillness gets it."""
    with look(sidecar(scenes.loading()), reduced_motion="reduce") as page:
        settled(page, "Loading")
        moves = "getComputedStyle(document.querySelector('.fill')).transitionDuration"
        assert page.evaluate(moves) == "0s"


def test_real_scale_is_light(sidecar: Sidecar, look: Open) -> None:
    """96 layers by 16 ranks: news four times a second must leave the browser nearly idle."""
    with look(sidecar(scenes.ready(16))) as page:
        settled(page, "Ready")
        elements, spent = page.evaluate(
            """() => {
              const begin = performance.now();
              for (let turn = 0; turn < 20; turn += 1) render();
              return [document.querySelectorAll("*").length, (performance.now() - begin) / 20];
            }"""
        )
    assert elements < 2000
    assert spent < 100, "milliseconds for one rendering without a change"


def test_name_of_a_lossless_rank(sidecar: Sidecar, look: Open) -> None:
    """Without conversion nobody is told that one goes on."""
    seen = scenes.converting(2)
    assert seen.supervisor is not None
    record = supervisor(phases=seen.supervisor.phases, canary=None, checkpoint=scenes.CHECKPOINT)
    with look(sidecar(journal(record, rank(0), rank(1)))) as page:
        expect(page.locator("#state-title")).to_have_text("Placing weights")
        expect(page.locator("#ranks")).not_to_contain_text("Converted")
