// SPDX-License-Identifier: Apache-2.0
// The banner, the state in plain words, the timeline of phases, and the small print at the end.
"use strict";

/** Who is looked at, and how its news arrives. */
function bannerView(state) {
  const deployment = state.status?.deployment;
  const facts = [
    ["Profile", deployment?.profile],
    ["Checkpoint", deployment && checkpointName(deployment.checkpoint)],
    ["Experts", state.status?.weights?.weights],
    ["Version", state.status?.versions.kimi_k3],
  ];
  return [
    h("div", { class: "who" },
      h("h1", {}, deployment?.served_model_name ?? "Kimi-K3 deployment"),
      h("p", { class: `contact ${liveness(state)}` }, h("span", { class: "dot", "aria-hidden": "true" }), contactWords(state))),
    h("dl", { class: "facts" }, facts.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value ?? UNKNOWN)))),
  ];
}

const ranks = ({ world_size, nodes, node }) =>
  count(world_size) + (nodes > 1 ? ` on ${nodes} nodes${node ? `, of which this is number ${node}; the first, 0, tells of all` : ""}` : "");

/** A checkpoint's name; only older sidecars give its path. */
const checkpointName = (checkpoint) => checkpoint.name ?? (checkpoint.path ? lastPart(checkpoint.path) : UNKNOWN);

function contactWords(state) {
  switch (liveness(state)) {
    case "none":
      return "Connecting";
    case "lost":
      return "No contact";
    case "stale":
      return "Stale";
    default:
      return state.streaming ? "Live" : "Live, asking every 2 s";
  }
}

/**
 * The state in plain words.
 * @returns {{ tone: string, title: string, rest: string | null, lines: string[] }}
 */
function headline(state, now) {
  const kind = liveness(state);
  if (kind === "none") return { tone: "wait", title: "Connecting", rest: null, lines: ["Asking the sidecar."] };
  const said = statement(state, now);
  if (kind === "live") return said;
  const ago = silence(state, now);
  const heard = ago === null ? "never heard from since this page was opened" : `last heard from ${duration(ago)} ago`;
  const then = state.startup || state.status ? [`Then it was: ${said.title}. The figures below are as old as that.`] : [];
  return kind === "lost"
    ? { tone: "bad", title: "No contact", rest: `the sidecar does not answer, ${heard}`, lines: then }
    : { tone: "bad", title: "Not reporting", rest: `stale: ${heard}`, lines: ["The supervisor has stopped reporting without an ending.", ...then] };
}

/** What the last answers say, taken at their word. */
function statement(state, now) {
  const { startup, readiness, status } = state;
  const phase = phaseOf(state);
  const ending = status?.deployment?.ending;
  if (!phase) {
    const why = readiness?.reasons[0]?.message ?? startup?.description ?? "No supervisor has reported in the state directory.";
    return { tone: "wait", title: "Nothing has reported", rest: null, lines: [sentence(why)] };
  }
  if (phase === "failed" || (ending && ending.exit_code !== 0)) {
    const code = ending ? [`It ended with exit code ${ending.exit_code}; why is below.`] : [];
    return { tone: "bad", title: PHASES.failed, rest: null, lines: code };
  }
  if (phase === "stopped" || ending) {
    return { tone: "off", title: PHASES.stopped, rest: null, lines: [ending ? sentence(ending.reason) : ""].filter(Boolean) };
  }
  if (phase === "ready") {
    if (readiness?.ready) return { tone: "good", title: PHASES.ready, rest: "traffic may come", lines: [] };
    if (!readiness) return { tone: "wait", title: "Started", rest: "whether traffic may come is not known yet", lines: [] };
    return { tone: "bad", title: "Not ready", rest: "no traffic may come", lines: readiness.reasons.map((reason) => reason.message) };
  }
  if (phase === "draining") return { tone: "wait", title: PHASES.draining, rest: null, lines: [sentence(startup?.description ?? "")] };
  const word = phaseWord(phase, isLossy(state) ?? true);
  const fraction = startup?.phase === phase ? startup.fraction : null;
  const left = startup?.phase === phase ? roughly(running(state, "startup", startup.remaining_seconds, now, -1)) : null;
  return {
    tone: "wait",
    title: isKnown(fraction) ? `${word} ${percent(fraction)}` : word,
    rest: left && `${left} left`,
    lines: startup?.phase === phase ? [sentence(startup.description)] : [],
  };
}

const sentence = (text) => text && text[0].toUpperCase() + text.slice(1) + (/[.!?)]$/.test(text) ? "" : ".");

/** What a screen reader is told when it changes: the state, without its percents. */
const announcement = (state, now) => headline(state, now).title.replace(/ \d+ %$/, "");

/** The page's title, for who has it in a tab. */
const documentTitle = (state, now) => `${headline(state, now).title} · ${state.status?.deployment?.served_model_name ?? "Kimi-K3"}`;

function stateView(state, now) {
  const { tone, title, rest, lines } = headline(state, now);
  const { startup } = state;
  const elapsed = liveness(state) === "live" ? running(state, "startup", startup?.elapsed_seconds, now) : null;
  const fraction = STARTING.includes(phaseOf(state)) ? startup?.fraction : null;
  return h("section", { key: "state", id: "state", class: `card state ${tone}`, tabindex: "-1", "aria-labelledby": "state-title" },
    h("h2", { id: "state-title" }, title, rest && h("span", { class: "rest" }, h("span", { class: "dash" }, " – "), rest)),
    lines.map((line) => h("p", {}, line)),
    state.strange.length > 0 && h("p", { class: "trouble" },
      `This page does not understand what the sidecar says about ${state.strange.join(", ")}; reload it, it may be of another version.`),
    isKnown(fraction) && bar(fraction, "whole"),
    state.status && h("h3", { class: "unseen" }, "Phases"),
    timelineView(state, now),
    elapsed !== null && h("p", { class: "quiet" }, `${duration(elapsed)} ${state.status?.deployment?.ending ? "from start to end" : "since the start"}.`));
}

/** Phases passed, the present one, and those that a start usually still meets. */
function timeline(state, now) {
  const history = state.status?.history ?? [];
  const phase = phaseOf(state);
  const deployment = state.status?.deployment;
  const live = liveness(state) === "live";
  const passed = history.map((span, index) => {
    const present = index === history.length - 1;
    // A silent supervisor has been in its last phase for as long as it reported, not until now.
    const seconds = !present ? span.seconds
      : live ? running(state, "status", span.seconds, now)
      : (Date.parse(deployment.updated_at) - Date.parse(span.started_at)) / 1000;
    return { phase: span.phase, seconds: ENDED.includes(span.phase) ? null : seconds, started_at: span.started_at, present: present && span.phase === phase, passed: true };
  });
  const last = history.length ? history[history.length - 1].phase : "pending";
  const usual = ["preflight", "loading", "converting", "compiling", "capturing", "warming", "ready"];
  const ahead = ENDED.includes(last) || deployment?.ending ? [] : usual.filter((one) => PHASE_ORDER.indexOf(one) > PHASE_ORDER.indexOf(last));
  return [...passed, ...ahead.map((one) => ({ phase: one, seconds: null, started_at: null, present: one === phase, passed: false }))];
}

function timelineView(state, now) {
  // Without the history nobody knows what has passed; only the state itself is told then.
  if (!state.status) return null;
  const lossy = isLossy(state) ?? true;
  const startup = state.startup;
  const left = liveness(state) === "live" ? roughly(running(state, "startup", startup?.remaining_seconds, now, -1)) : null;
  const steps = timeline(state, now);
  const longest = Math.max(1, ...steps.filter((step) => STARTING.includes(step.phase)).map((step) => step.seconds ?? 0));
  return h("ol", { class: "timeline" }, steps.map((step) => {
    const kind = step.phase === "failed" ? "failed" : step.present ? "present" : step.passed ? "passed" : "ahead";
    const rest = step.present && STARTING.includes(step.phase) && startup?.phase === step.phase ? left : null;
    const spent = ENDED.includes(step.phase) ? "" : step.passed ? duration(step.seconds) : "now";
    return h("li", { key: step.phase, class: kind, "aria-current": step.present ? "step" : null, title: step.started_at ? `since ${step.started_at}` : null },
      h("span", { class: "name" }, phaseWord(step.phase, lossy)),
      h("span", { class: "spent" }, step.passed || step.present ? spent : [h("span", { "aria-hidden": "true" }, UNKNOWN), h("span", { class: "unseen" }, "not yet")]),
      STARTING.includes(step.phase) ? bar(step.passed ? (step.seconds ?? 0) / longest : 0, "time") : bar(0, "time none"),
      rest && h("span", { class: "left" }, `${rest} left`));
  }));
}

/** What somebody reports with a fault. */
function footerView(state, wall) {
  const { status } = state;
  const deployment = status?.deployment;
  const health = status?.engine?.health;
  const canary = deployment?.canary;
  const facts = [
    ["Start", deployment?.start_id],
    ["Started", deployment && moment(state, deployment.started_at, wall)],
    ["Ranks", deployment && ranks(deployment)],
    ["Checkpoint", deployment && `${size(deployment.checkpoint.total_bytes)}, ${several(deployment.checkpoint.shards, "shard")}, ${several(deployment.checkpoint.decoder_layers, "layer")}`],
    ["Engine", health ? `${health.outcome}: ${health.detail}` : status?.engine ? "not asked" : null],
    ["First answer", canary ? `${count(canary.completion_tokens)} tokens in ${duration(canary.seconds)}` : deployment ? "not yet" : null],
    ["Python", status?.versions.python],
    ["Journal", status && `version ${status.versions.journal}`],
  ];
  return [
    h("h2", {}, "Details"),
    h("dl", { class: "facts" }, facts.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value ?? UNKNOWN)))),
  ];
}
