// SPDX-License-Identifier: Apache-2.0
// The one place with effects: it holds the state, shows it, and carries out what a person asks for.
"use strict";

const NAME = "kimi-k3-acknowledger";
const SHOW_MS = 50;
const TICK_MS = 1000;
const SUMS_MS = 15000;

let state = NOTHING;
let planned = false;

const place = (id) => document.getElementById(id);

function change(next) {
  state = next;
  if (planned) return;
  planned = true;
  // Not an animation frame: the title of a page in the background must stay true.
  setTimeout(() => {
    planned = false;
    render();
  }, SHOW_MS);
}

function render() {
  const [now, wall] = [performance.now(), Date.now()];
  document.documentElement.dataset.liveness = liveness(state);
  document.title = documentTitle(state, now);
  show(place("banner"), bannerView(state));
  show(place("main"), [
    stateView(state, now),
    tokenView(state),
    failuresView(state, wall),
    previousView(state, wall),
    warningsView(state, wall, remembered()),
    ranksView(state),
    heatView(state),
    memoryView(state),
  ]);
  show(place("footer"), footerView(state, wall));
  const said = announcement(state, now);
  if (place("announcer").textContent !== said) place("announcer").textContent = said;
}

function heard(kind, data) {
  const before = { phase: phaseOf(state), start: state.status?.deployment?.start_id };
  change(received(state, kind, data, performance.now(), Date.now()));
  const restarted = state.status?.deployment?.start_id !== before.start;
  // The stream tells that the phase or the warnings changed; the history and the failures come with /status.
  if (phaseOf(state) !== before.phase || (kind === "warnings" && state.streaming)) connection.refresh("status");
  if (phaseOf(state) !== before.phase) connection.refresh("conversion");
  // The sums over all layers come with /conversion, which is large.
  if (kind === "converted") connection.refresh("conversion", SUMS_MS);
  if (restarted && before.start !== undefined) connection.restart();
}

const connection = connect({
  heard,
  silent: () => change(unanswered(state)),
  streaming: (is) => change({ ...state, streaming: is }),
  locked: (is) => change({ ...state, locked: is, refused: is && sessionStorage.getItem(TOKEN) !== null, answers: true, heard: performance.now() }),
});

/** Who acknowledged last on this machine; nobody where a browser keeps nothing. */
function remembered() {
  try {
    return localStorage.getItem(NAME) ?? "";
  } catch {
    return "";
  }
}

function remember(name) {
  try {
    localStorage.setItem(NAME, name);
  } catch {
    // It is asked for again.
  }
}

const acknowledgementPath = (id) => `/warnings/${encodeURIComponent(id)}/acknowledgement`;

async function send(id, method, body) {
  try {
    const options = body ? { method, headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) } : { method };
    const answer = await ask(acknowledgementPath(id), options);
    if (answer.status >= 400) throw new Error(answer.body?.detail ?? `the sidecar answered ${answer.status}`);
    change({ ...state, writing: null, trouble: null });
    const { status, body: fresh } = await ask("/warnings");
    if (status === 200) heard("warnings", fresh);
    focusSoon(`#matter-${CSS.escape(id)}`);
  } catch (error) {
    change({ ...state, trouble: { id, text: `Not done: ${error.message}.`.replace(/\.\.$/, ".") } });
  }
}

/** Where somebody with a keyboard goes on, once it is shown. */
const focusSoon = (selector) => setTimeout(() => document.querySelector(selector)?.focus(), 2 * SHOW_MS);

const ACTIONS = {
  write: (id) => {
    change({ ...state, writing: id, trouble: null });
    focusSoon(`form[data-action="acknowledge"] input`);
  },
  cancel: (id) => {
    change({ ...state, writing: null, trouble: null });
    focusSoon(`#matter-${CSS.escape(id)} button`);
  },
  withdraw: (id) => send(id, "DELETE", null),
};

const FORMS = {
  acknowledge: (id, fields) => {
    const by = fields.by.trim();
    if (!by) return;
    remember(by);
    send(id, "POST", { by, ...(fields.note.trim() ? { note: fields.note.trim() } : {}) });
  },
  unlock: (_, fields) => {
    sessionStorage.setItem(TOKEN, fields.token.trim());
    change({ ...state, refused: false });
    connection.restart();
  },
};

document.addEventListener("click", (event) => {
  const button = event.target.closest("button[data-action]");
  if (button) ACTIONS[button.dataset.action](button.dataset.id);
});

document.addEventListener("submit", (event) => {
  event.preventDefault();
  const { action, id } = event.target.dataset;
  FORMS[action](id, Object.fromEntries(new FormData(event.target)));
});

const cellOf = (event) => event.target.closest?.("table.map td[data-layer]");

function choose(cell) {
  const { projection } = cell.closest("table").dataset;
  change({ ...state, chosen: { ...state.chosen, [projection]: Number(cell.dataset.layer) } });
}

for (const kind of ["focusin", "pointerover"]) {
  document.addEventListener(kind, (event) => cellOf(event) && choose(cellOf(event)));
}

document.addEventListener("keydown", (event) => {
  const cell = cellOf(event);
  if (!cell || event.ctrlKey || event.altKey || event.metaKey) return;
  const cells = cell.closest("table").querySelectorAll("td[data-layer]");
  const to = moved(Number(cell.dataset.layer), event.key, cells.length);
  if (to === null) return;
  event.preventDefault();
  cells[to].focus();
});

setInterval(render, TICK_MS);
render();
