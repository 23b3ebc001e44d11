// SPDX-License-Identifier: Apache-2.0
// What wants somebody's attention: the token that is asked for, failures, and warnings with their acknowledgement.
"use strict";

function tokenView(state) {
  if (!state.locked) return null;
  return card("token", "This sidecar asks for a token",
    h("p", {}, "Without it only the state and the ranks' progress can be shown. It is kept until this tab is closed."),
    h("form", { "data-action": "unlock", class: "row" },
      h("label", {}, "Token", h("input", { name: "token", type: "password", required: true, autocomplete: "off" })),
      h("button", { type: "submit" }, "Unlock")),
    state.refused && h("p", { class: "trouble", role: "alert" }, "The sidecar does not accept this token."));
}

/** Why the start before failed, until this one serves: who comes between two starts sees no other reason. */
function previousView(state, wall) {
  const previous = state.status?.deployment?.previous;
  if (!previous || previous.phase === "stopped" || !STARTING.includes(phaseOf(state))) return null;
  const { ending } = previous;
  const explanation = ending?.explanation;
  return card("previous", "Why the start before failed",
    h("article", { key: "previous", class: "matter warning" },
      h("h3", {}, ending ? sentence(ending.reason) : "Its supervisor was killed, or its machine went down."),
      explanation && h("p", {}, explanation.cause),
      remedyView(explanation?.remedy),
      h("p", { class: "quiet" }, `It had reached: ${phaseWord(previous.reached)}. `, ending ? `Exit code ${ending.exit_code}, ` : "Last heard of ",
        moment(state, ending?.at ?? previous.updated_at, wall), ".")));
}

/** Why it failed: the ending first, then what single processes reported before they gave up. */
function failuresView(state, wall) {
  const ending = state.status?.deployment?.ending;
  const failures = state.status?.failures ?? [];
  const failed = ending && ending.exit_code !== 0;
  if (!failed && !failures.length) return null;
  const explanation = ending?.explanation;
  return card("failures", failed ? "Why it failed" : "Failures",
    failed && h("article", { key: "ending", class: "matter critical" },
      h("h3", {}, sentence(ending.reason)),
      explanation && h("p", {}, explanation.cause),
      explanation?.text && h("pre", {}, explanation.text),
      remedyView(explanation?.remedy),
      h("p", { class: "quiet" }, `Exit code ${ending.exit_code}, `, moment(state, ending.at, wall),
        explanation && isKnown(explanation.line) ? `, line ${count(explanation.line)} of the engine's output` : "", ".")),
    failures.map((failure) => h("article", { key: `failure-${failure.pid}`, class: "matter critical" },
      h("h3", {}, sentence(failure.what)),
      remedyView(failure.remedy),
      h("p", { class: "quiet" }, `Reported by process ${failure.pid}, `, moment(state, failure.at, wall), "."))));
}

const remedyView = (remedy) => remedy && h("p", { class: "remedy" }, h("strong", {}, "What to do: "), remedy);

/** Not yet acknowledged before acknowledged, critical before others, otherwise as the sidecar orders them. */
function ordered(warnings) {
  const weight = (warning) => (warning.acknowledged ? 2 : 0) + (warning.severity === "critical" ? 0 : 1);
  return [...warnings].sort((one, other) => weight(one) - weight(other));
}

function warningsView(state, wall, name) {
  const { warnings } = state;
  if (warnings === null) return null;
  if (!warnings.length) return card("warnings", "Warnings", h("p", { class: "quiet" }, "None."));
  return card("warnings", `Warnings (${warnings.length})`,
    ordered(warnings).map((warning, index) => warningView(state, warning, warning.id ?? `${warning.code}-${index}`, wall, name)));
}

function warningView(state, warning, id, wall, name) {
  const { acknowledged } = warning;
  const writing = state.writing === id;
  const title = `warning-${id}`;
  return h("article", { key: id, class: `matter ${warning.severity} ${acknowledged ? "acknowledged" : ""}`.trim(), "aria-labelledby": title, id: `matter-${id}`, tabindex: "-1" },
    h("h3", { id: title },
      h("span", { class: `badge ${warning.severity}` }, SEVERITY[warning.severity] ?? warning.severity), " ", warning.message),
    remedyView(warning.remedy),
    h("p", { class: "quiet" }, h("code", {}, id),
      warning.since ? [", for ", lasting(state, warning.since, wall)] : ", since an unknown time", "."),
    acknowledged && h("p", { class: "by" }, "Acknowledged by ", h("strong", {}, acknowledged.by), " ", moment(state, acknowledged.at, wall),
      acknowledged.note ? [": ", h("q", {}, acknowledged.note)] : ""),
    warning.acknowledgeable && (acknowledged
      ? h("button", { key: "button", type: "button", "data-action": "withdraw", "data-id": id, "aria-describedby": title }, "Withdraw")
      : writing
        ? acknowledgeForm(state, id, title, name)
        : h("button", { key: "button", type: "button", "data-action": "write", "data-id": id, "aria-describedby": title }, "Acknowledge")),
    state.trouble?.id === id && h("p", { class: "trouble", role: "alert" }, state.trouble.text));
}

const acknowledgeForm = (state, id, title, name) =>
  h("form", { key: "form", class: "row", "data-action": "acknowledge", "data-id": id, "aria-labelledby": title },
    h("label", {}, "Your name", h("input", { name: "by", required: true, maxlength: 100, autocomplete: "name", value: name })),
    h("label", { class: "wide" }, "Note (optional)", h("input", { name: "note", maxlength: 500, autocomplete: "off" })),
    h("button", { type: "submit" }, "Acknowledge"),
    h("button", { type: "button", class: "plain", "data-action": "cancel", "data-id": id }, "Cancel"));
