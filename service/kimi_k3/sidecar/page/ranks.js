// SPDX-License-Identifier: Apache-2.0
// How far each rank has come.
"use strict";

const loadedShare = (progress) =>
  isKnown(progress?.bytes_done) && progress.bytes_total > 0 ? progress.bytes_done / progress.bytes_total : null;

const convertedShare = (progress) =>
  progress?.conversions_expected > 0 ? progress.conversions_done / progress.conversions_expected : null;

/** One sentence about all of them, with the one that the others wait for. */
function ranksSummary(rows, phase) {
  const reported = rows.filter((row) => row.progress);
  const head = `${reported.length} of ${several(rows.length, "rank")} ${reported.length === 1 ? "reports" : "report"}`;
  const share = phase === "converting" ? convertedShare : loadedShare;
  const shares = reported.map((row) => [share(row.progress), row.number]).filter(([one]) => isKnown(one) && one < 1);
  if (shares.length < 2 || !["loading", "converting"].includes(phase)) return `${head}.`;
  const [least, number] = shares.sort(([one], [other]) => one - other)[0];
  return `${head}; the slowest is rank ${number} with ${percent(least)}.`;
}

function ranksView(state) {
  const rows = rankRows(state);
  if (!rows.length) return null;
  const converts = rows.some((row) => row.progress?.conversions_expected > 0);
  return card("ranks", "Ranks",
    h("p", { class: "quiet" }, ranksSummary(rows, phaseOf(state))),
    h("ul", { class: `ranks ${converts ? "converts" : ""}`.trim() }, rows.map((row) => rankView(row, converts, isLossy(state) ?? true))));
}

function rankView({ number, progress }, converts, lossy) {
  const name = h("span", { class: "rank" }, `Rank ${number}`);
  if (!progress) return h("li", { key: number, class: "silent" }, name, h("span", { class: "quiet" }, "has not reported"));
  const read = isKnown(progress.bytes_done) ? sizeOf(progress.bytes_done, progress.bytes_total) : "not measured";
  return h("li", { key: number },
    h("span", { class: "who" }, name, h("span", { class: "quiet" }, phaseWord(progress.phase, lossy))),
    gauge("Loaded", loadedShare(progress), read),
    converts && gauge("Converted", convertedShare(progress),
      progress.conversions_expected > 0 ? `${progress.conversions_done} of ${progress.conversions_expected}` : "nothing to convert"));
}

/** A label, a percentage, the figures behind it, and the bar. */
const gauge = (label, share, figures) =>
  h("span", { class: "gauge" },
    h("span", { class: "label" }, label, " ", h("b", {}, percent(share))), " ",
    h("span", { class: "figures" }, figures),
    bar(share));
