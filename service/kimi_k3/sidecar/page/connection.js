// SPDX-License-Identifier: Apache-2.0
// How news arrives: by the event stream, or by asking every few seconds while there is no stream.
"use strict";

const TOKEN = "kimi-k3-sidecar-token";

/** What is asked for while there is no stream, and how often, in milliseconds. */
const POLLED = [
  { kind: "startup", path: "/startupz", every: 2000 },
  { kind: "readiness", path: "/readyz", every: 2000 },
  { kind: "status", path: "/status", every: 2000 },
  { kind: "warnings", path: "/warnings", every: 2000 },
  { kind: "memory", path: "/memory", every: 6000 },
  // Its answer has a row for every rank, layer and projection.
  { kind: "conversion", path: "/conversion", every: 10000 },
];
/** The same with a stream, which carries neither the history of phases nor the sums over all layers. */
const BESIDE_STREAM = [
  { kind: "status", path: "/status", every: 5000 },
  { kind: "conversion", path: "/conversion", every: 120000 },
];
const ROUND_MS = 500;
const ANSWER_MS = 8000;
/** The stream says something at least every 15 s; three times that is silence. */
const STREAM_SILENCE_MS = 45000;
const RETRY_MS = 2000;
const LONGEST_RETRY_MS = 30000;

const headers = (more = {}) => {
  const token = sessionStorage.getItem(TOKEN);
  return { ...more, ...(token ? { Authorization: `Bearer ${token}` } : {}) };
};

/**
 * Ask one path. Answers of 503 are answers too: they say why not.
 * @returns {Promise<{ status: number, body: any }>} rejects when there is no answer, or none that can be read
 */
async function ask(path, options = {}) {
  const answer = await fetch(path, {
    ...options,
    headers: headers(options.headers),
    cache: "no-store",
    signal: AbortSignal.timeout(ANSWER_MS),
  });
  return { status: answer.status, body: answer.status === 204 ? null : await answer.json() };
}

/** Events from a stream's text so far, and the text that is left; see "Server-sent events" in the HTML standard. */
function parseEvents(text) {
  // A carriage return at the end may be half of a line's end.
  const half = text.endsWith("\r") ? "\r" : "";
  const blocks = text.slice(0, text.length - half.length).replace(/\r\n?/g, "\n").split("\n\n");
  const rest = blocks.pop() + half;
  const events = blocks.map((block) => {
    const event = { id: null, kind: "message", data: "", retry: null };
    for (const line of block.split("\n")) {
      const [, name, value] = line.match(/^(\w+):? ?(.*)$/s) ?? [];
      if (name === "id") event.id = value;
      if (name === "event") event.kind = value;
      if (name === "retry" && /^\d+$/.test(value)) event.retry = Number(value);
      if (name === "data") event.data += (event.data && "\n") + value;
    }
    return event;
  });
  return { events: events.filter((event) => event.data || event.retry !== null), rest };
}

/**
 * Keep `tell` informed for as long as the page lives.
 * @param {{ heard: (kind: string, data: any) => void, silent: () => void, streaming: (is: boolean) => void,
 *   locked: (is: boolean) => void }} tell
 * @returns {{ refresh: (kind: string, spacing?: number) => void, restart: () => void }} `refresh` has a kind asked
 *   for soon, `spacing` milliseconds after the last time at the earliest; `restart` begins anew
 */
function connect(tell) {
  /** When each kind is asked next, was asked last, and somebody wants it sooner. @type {Map<string, number>[]} */
  const [due, asked, wanted] = [new Map(), new Map(), new Map()];
  /** When the stream last told each kind. @type {Map<string, number>} */
  const told = new Map();
  /** When the sidecar last said anything. */
  let answered = -Infinity;
  let streaming = false;
  /** The last event that was read, for the sidecar to go on after it. @type {string | null} */
  let last = null;
  let abort = new AbortController();
  let wake = () => {};

  const pause = (milliseconds) => new Promise((resolve) => {
    wake = resolve;
    setTimeout(resolve, milliseconds);
  });

  function setStreaming(is) {
    if (streaming === is) return;
    streaming = is;
    // A new stream may be that of a new sidecar; and without one everything is as old as its last event.
    due.clear();
    tell.streaming(is);
  }

  /** Each kind is asked by itself: a slow answer holds up no other. A 401 and a 404 are answers as well. */
  async function askOne({ kind, path, every }) {
    const now = performance.now();
    due.set(kind, Infinity);
    wanted.delete(kind);
    asked.set(kind, now);
    let next = every;
    try {
      const { status, body } = await ask(path);
      answered = performance.now();
      if (status === 200 || (status === 503 && (kind === "startup" || kind === "readiness"))) {
        // An event that came meanwhile is newer, and none like it may come for long.
        if (!(told.get(kind) >= now)) tell.heard(kind, body);
        if (kind === "status") tell.locked(false);
      } else if (status === 401) tell.locked(true);
      else tell.heard("refusal", body);
    } catch {
      next = RETRY_MS;
      // Silence is when nothing else was answered meanwhile either.
      if (answered < now) {
        abort.abort();
        tell.silent();
      }
    }
    due.set(kind, performance.now() + next);
  }

  function poll() {
    const now = performance.now();
    for (const one of streaming ? BESIDE_STREAM : POLLED) {
      if ((due.get(one.kind) ?? 0) <= now || (wanted.get(one.kind) ?? Infinity) <= now) askOne(one);
    }
  }

  async function stream() {
    let wait = RETRY_MS;
    for (;;) {
      abort = new AbortController();
      const { seen, retry, locked } = await follow(abort);
      setStreaming(false);
      wait = seen ? retry ?? RETRY_MS : Math.min(wait * 2, LONGEST_RETRY_MS);
      if (locked) tell.locked(true);
      await pause(wait);
    }
  }

  /** Read one stream to its end; whatever goes wrong with it, polling goes on. */
  async function follow(controller) {
    const end = { seen: false, retry: null, locked: false };
    let timer;
    const watch = () => {
      clearTimeout(timer);
      timer = setTimeout(() => controller.abort(), STREAM_SILENCE_MS);
    };
    try {
      watch();
      const answer = await fetch("/events", {
        headers: headers({ Accept: "text/event-stream", ...(last ? { "Last-Event-ID": last } : {}) }),
        cache: "no-store",
        signal: controller.signal,
      });
      const suits = answer.ok && answer.headers.get("content-type")?.startsWith("text/event-stream");
      if (!suits) {
        end.locked = answer.status === 401;
        await answer.body?.cancel();
        return end;
      }
      setStreaming(true);
      const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
      let text = "";
      for (;;) {
        const { done, value } = await reader.read();
        if (done) return end;
        watch();
        answered = performance.now();
        end.seen = true;
        const { events, rest } = parseEvents(text + value);
        text = rest;
        for (const event of events) {
          end.retry = event.retry ?? end.retry;
          last = event.id ?? last;
          if (!event.data) continue;
          told.set(event.kind, answered);
          tell.heard(event.kind, JSON.parse(event.data));
        }
      }
    } catch {
      return end;
    } finally {
      clearTimeout(timer);
      controller.abort();
    }
  }

  poll();
  setInterval(poll, ROUND_MS);
  stream();
  return {
    refresh: (kind, spacing = 0) => wanted.set(kind, (asked.get(kind) ?? -Infinity) + spacing),
    restart: () => {
      last = null;
      due.clear();
      abort.abort();
      wake();
    },
  };
}
