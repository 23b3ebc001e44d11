# SPDX-License-Identifier: Apache-2.0
"""The page's pure functions, asked in the browser that runs them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser

import kimi_k3.sidecar.page as room

PAGE = Path(room.__file__).with_name("page")
GIB = 2**30


@pytest.fixture(scope="module")
def ask(chromium: Browser) -> Iterator[Any]:
    """Evaluates an expression where the modules without effects are loaded."""
    page = chromium.new_page()
    for name in ("words", "state", "element", "overview", "ranks", "heat", "memory", "connection"):
        page.add_script_tag(content=(PAGE / f"{name}.js").read_text())
    yield page.evaluate
    page.close()


@pytest.mark.parametrize(
    ("expression", "words"),
    [
        ("percent(0.4399)", "43 %"),
        ("percent(0.9999)", "99 %"),
        ("percent(1)", "100 %"),
        ("percent(0)", "0 %"),
        ("percent(null)", "–"),
        ("percent(NaN)", "–"),
        ("size(0)", "0 B"),
        ("size(1000)", "1,000 B"),
        ("size(1024)", "1 KiB"),
        (f"size({1453 * GIB})", "1,453 GiB"),
        (f"size({10 * 1024 * GIB})", "10 TiB"),
        ("size(undefined)", "–"),
        (f"sizeOf({GIB // 2}, {2 * GIB})", "0.5 of 2 GiB"),
        (f"sizeOf({GIB}, null)", "1 GiB of –"),
        ("duration(0.8)", "0.8 s"),
        ("duration(0)", "0 s"),
        ("duration(59.6)", "1 min"),
        ("duration(125)", "2 min 5 s"),
        ("duration(725)", "12 min"),
        ("duration(3599)", "1 h"),
        ("duration(3900)", "1 h 5 min"),
        ("duration(260000)", "3 days"),
        ("duration(-1)", "–"),
        ("roughly(4)", "a few seconds"),
        ("roughly(34)", "about 40 s"),
        ("roughly(700)", "about 12 min"),
        ("roughly(null)", None),
        ("ratio(0)", "0"),
        ("ratio(0.0046153)", "0.00462"),
        ("ratio(0.0000123)", "1.23e-5"),
        ("ratio(null)", "–"),
        ("several(1, 'rank')", "1 rank"),
        ("several(1234, 'rank')", "1,234 ranks"),
        ("lastPart('/models/kimi-k3/')", "kimi-k3"),
        ("phaseWord('converting', false)", "Placing weights"),
        ("phaseWord('unheard-of')", "unheard-of"),
        ("sentence('it is')", "It is."),
    ],
)
def test_words(ask: Any, expression: str, words: str | None) -> None:
    """What an operator reads, at the edges; what is unknown is a dash, never 0."""
    assert ask(expression) == words


def test_colours(ask: Any) -> None:
    """The scale is fixed: a colour means the same in every start."""
    assert ask("[0, 0.001, 0.03, 7].map(level)") == [0, 0, 1, 1]
    assert ask("level(0.003) > 0.3 && level(0.003) < 0.35")


@pytest.mark.parametrize(
    ("layer", "key", "to"),
    [
        (0, "ArrowLeft", None),
        (95, "ArrowRight", None),
        (90, "ArrowDown", None),
        (5, "a", None),
        (5, "End", 95),
    ],
)
def test_moves_stay_on_the_map(ask: Any, layer: int, key: str, to: int | None) -> None:
    """At its edges the arrows stay, and other keys are left to the browser."""
    assert ask(f"moved({layer}, {key!r}, 96)") == to


def test_events_in_any_pieces(ask: Any) -> None:
    """A network cuts a stream anywhere; no event is lost, doubled or read before it is whole."""
    text = (
        "retry: 2000\n\n: keep-alive\n\n"
        'id: b-1\nevent: startup\ndata: {"a":1}\n\n'
        "id: b-2\r\nevent: x\r\ndata:y\r\n\r\n"
    )
    read = """text => {
      const whole = parseEvents(text).events;
      for (let cut = 0; cut <= text.length; cut += 1) {
        const first = parseEvents(text.slice(0, cut));
        const second = parseEvents(first.rest + text.slice(cut));
        const pieces = [...first.events, ...second.events];
        if (JSON.stringify(pieces) !== JSON.stringify(whole)) return [cut, pieces];
      }
      return whole;
    }"""
    events = ask(read, text)
    assert [(one.get("id"), one["kind"], one["data"]) for one in events[1:]] == [
        ("b-1", "startup", '{"a":1}'),
        ("b-2", "x", "y"),
    ]
    assert events[0]["retry"] == 2000


def test_older_report_of_a_layer_is_left_out(ask: Any) -> None:
    """An answer that was under way while an event came must not take a rank away again."""
    late, early = ({"layer": 1, "projection": "w2", "ranks_done": done} for done in (8, 3))
    assert ask(f"merged({json.dumps({'1/w2': late})}, [{json.dumps(early)}])") == {"1/w2": late}


def test_clock_of_this_machine_may_be_wrong(ask: Any) -> None:
    """Ages are told by the sidecar's clock, which is the journal's."""
    status: dict[str, Any] = dict.fromkeys(("history", "weights", "failures", "versions"))
    status["deployment"] = {"updated_at": "2026-05-01T12:00:00Z", "age_seconds": 2, "start_id": "a"}
    state = f"received(NOTHING, 'status', {json.dumps(status)}, 0, Date.parse('2031-01-01T00:00:00Z'))"
    ago = f"secondsAgo({state}, '2026-05-01T11:59:00Z', Date.parse('2031-01-01T00:00:08Z'))"
    assert ask(ago) == 70


def test_memory_of_older_and_newer_sidecars(ask: Any) -> None:
    """Without parts there is one bar in use; with them the rest of it is named."""
    old = {"rank": 0, "reading": {"kind": "device", "used_bytes": 5, "peak_bytes": None, "total_bytes": 9}}
    assert ask(f"rankMemory({json.dumps(old)}).actual") == [["weights", None], ["cache", None], ["used", 5]]
    new = {"rank": 0, "actual": {"weights_bytes": 3, "used_bytes": 5, "free_bytes": 4}}
    assert ask(f"rankMemory({json.dumps(new)}).actual") == [["weights", 3], ["cache", None], ["other", 2]]
    assert ask(f"rankMemory({json.dumps(new)}).total") == 9


def test_peak_of_loading_is_not_part_of_the_plan(ask: Any) -> None:
    """Loading is over before there is a cache; adding both would show a plan beyond its limit."""
    plan = {"weights_bytes": 5, "transient_bytes": 3, "step_bytes": 1, "kv_cache_bytes": 2, "limit_bytes": 9}
    found = ask(f"rankMemory({json.dumps({'rank': 0, 'planned': plan})})")
    assert found["planned"] == [["weights", 5], ["step", 1], ["cache", 2]]
    assert (found["loading"], found["limit"]) == (8, 9)


def test_elements_are_kept(ask: Any) -> None:
    """Where a reader is, and what was typed, survives news above, below and in between."""
    check = """() => {
      const place = document.createElement("div");
      document.body.append(place);
      const row = (key) => h("p", { key }, h("input", { name: key }));
      show(place, ["a", "b", "c"].map(row));
      const input = place.querySelector("[name=b]");
      input.value = "typed";
      input.focus();
      const kept = [];
      for (const keys of [["x", "a", "b", "c"], ["b", "c"], ["b"], ["x", "y", "b", "z"]]) {
        show(place, keys.map(row));
        kept.push(document.activeElement === input && input.value === "typed" && place.contains(input));
        kept.push([...place.children].map((child) => child.kimiKey).join("") === keys.join(""));
      }
      show(place, ["text", h("b", {}, "bold"), null]);
      return [kept.every(Boolean), place.innerHTML];
    }"""
    assert ask(check) == [True, "text<b>bold</b>"]
