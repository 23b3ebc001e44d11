// SPDX-License-Identifier: Apache-2.0
// Relative error by layer and projection. The colour scale is fixed, so that pictures of two starts compare.
"use strict";

const COLUMNS = 12;
const SCALE = { low: 0.001, high: 0.03, ticks: [0.001, 0.003, 0.01, 0.03] };
const PROJECTIONS = { w13: "w13, gate and up", w2: "w2, down" };

/** Where on the colour scale an error stands, 0 to 1, by its logarithm. */
const level = (error) =>
  error <= SCALE.low ? 0 : Math.min(1, Math.log(error / SCALE.low) / Math.log(SCALE.high / SCALE.low));

/**
 * Every layer with what is known of it. `kind` is "none" (no experts), "waiting", "partial" (some ranks), "done",
 * or "blank" (converted, but all its weights are zero, so that nothing can be measured).
 */
function heatCells(state, projection) {
  const checkpoint = state.status?.deployment?.checkpoint;
  const found = Object.values(state.converted).filter((one) => one.projection === projection);
  const last = Math.max(-1, ...found.map((one) => one.layer));
  const expected = new Set(checkpoint?.moe_layers ?? []);
  return [...Array(Math.max(checkpoint?.decoder_layers ?? 0, last + 1)).keys()].map((layer) => {
    const loss = state.converted[`${layer}/${projection}`] ?? null;
    if (!loss || !loss.ranks_done) return { layer, loss: null, kind: expected.has(layer) ? "waiting" : "none" };
    if (!isKnown(loss.relative_mse)) return { layer, loss, kind: "blank" };
    return { layer, loss, kind: loss.ranks_done < loss.ranks_expected ? "partial" : "done" };
  });
}

function cellWords({ layer, loss, kind }) {
  if (kind === "none") return `Layer ${layer}: no experts`;
  if (kind === "waiting") return `Layer ${layer}: not converted yet`;
  const error = isKnown(loss.relative_mse) ? `relative error ${ratio(loss.relative_mse)}` : "relative error not measured, all weights are zero";
  const largest = isKnown(loss.max_error) ? `, largest ${ratio(loss.max_error)}` : "";
  const exact = isKnown(loss.lossless_ratio) ? `, ${percent(loss.lossless_ratio)} of groups exact` : "";
  return `Layer ${layer}: ${error}${largest}${exact}, ${loss.ranks_done} of ${several(loss.ranks_expected, "rank")}`;
}

/** The two ends of what was measured, in words: what the colours say, for who does not see them. */
function extremes(state) {
  const measured = Object.values(state.converted).filter((one) => isKnown(one.relative_mse));
  if (!measured.length) return "No layer has been converted yet.";
  measured.sort((one, other) => one.relative_mse - other.relative_mse);
  const [least, most] = [measured[0], measured[measured.length - 1]];
  const where = (one) => `${ratio(one.relative_mse)} at layer ${one.layer} ${one.projection}`;
  return least === most ? `Measured: ${where(least)}.` : `Lowest ${where(least)}, highest ${where(most)}.`;
}

/** Layer projections converted on all ranks together; by the ranks' own reports, which are the newest. */
function conversionProgress(state) {
  const ranks = state.startup?.ranks ?? [];
  const known = knownRanks(state).length;
  const [one] = ranks;
  if (!one || !known) return null;
  return {
    done: ranks.reduce((sum, rank) => sum + rank.conversions_done, 0),
    // Pipeline stages have different layers, so of those that have not reported this is a guess.
    expected: ranks.reduce((sum, rank) => sum + rank.conversions_expected, 0) + Math.max(0, known - ranks.length) * one.conversions_expected,
  };
}

function heatView(state) {
  const { conversion } = state;
  if (!conversion && !Object.keys(state.converted).length) return null;
  const lossy = conversion?.lossless === false || Object.keys(state.converted).length > 0;
  if (!lossy) return card("error", "Relative error of the experts", h("p", { class: "quiet" }, conversion.note));
  const total = conversion?.total;
  const progress = conversionProgress(state);
  return card("error", "Relative error of the experts",
    conversion && h("p", { class: "quiet" }, conversion.note),
    h("p", {}, extremes(state)),
    h("dl", { class: "facts" }, [
      ["Of all weights", ratio(total?.relative_mse)],
      ["Largest error", ratio(total?.max_error)],
      ["Groups exact", percent(total?.lossless_ratio)],
      ["Scale rule", conversion?.requantisation?.rule ?? UNKNOWN],
      ["Converted", progress ? `${count(progress.done)} of ${count(progress.expected)}` : UNKNOWN],
    ].map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value)))),
    legendView(),
    h("div", { class: "maps" }, Object.keys(PROJECTIONS).map((projection) => mapView(state, projection))));
}

const legendView = () =>
  h("div", { class: "legend" },
    h("div", { class: "ramp" },
      h("span", { class: "colours", "aria-hidden": "true" }),
      SCALE.ticks.map((tick) => h("span", { class: "tick", vars: { "--level": level(tick) } },
        tick === SCALE.low ? `≤ ${tick}` : tick === SCALE.high ? `≥ ${tick}` : tick))),
    h("ul", { class: "keys" }, [["partial", "some ranks"], ["waiting", "not yet"], ["none", "no experts"]].map(([kind, words]) =>
      h("li", {}, h("span", { class: `cell ${kind}`, vars: { "--level": 0.5 }, "aria-hidden": "true" }), words))));

/** One projection as a grid to walk with the arrow keys; what the chosen cell holds is said above it. */
function mapView(state, projection) {
  const cells = heatCells(state, projection);
  const chosen = Math.min(state.chosen?.[projection] ?? firstOf(cells), cells.length - 1);
  const rows = [...Array(Math.ceil(cells.length / COLUMNS)).keys()].map((row) => cells.slice(row * COLUMNS, (row + 1) * COLUMNS));
  return h("figure", { key: projection },
    h("figcaption", { id: `map-${projection}` }, h("h3", {}, PROJECTIONS[projection])),
    h("p", { class: "readout", "aria-hidden": "true" }, cells[chosen] ? cellWords(cells[chosen]) : UNKNOWN),
    h("table", { role: "grid", class: "map", "aria-labelledby": `map-${projection}`, "data-projection": projection },
      h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "Layer"),
        [...Array(COLUMNS).keys()].map((column) => h("th", { scope: "col" }, `+${column}`)))),
      h("tbody", {}, rows.map((row) => h("tr", {},
        h("th", { scope: "row" }, row[0].layer),
        row.map((cell) => h("td", { "data-layer": cell.layer, tabindex: cell.layer === chosen ? "0" : "-1", class: cell.layer === chosen && state.chosen?.[projection] !== undefined ? "chosen" : null },
          h("span", { class: `cell ${cell.kind}`, vars: { "--level": isKnown(cell.loss?.relative_mse) ? level(cell.loss.relative_mse) : 0 } },
            h("span", { class: "unseen" }, cellWords(cell))))),
        row.length < COLUMNS && h("td", { class: "rest", colspan: COLUMNS - row.length, "aria-hidden": "true" }))))));
}

/** The layer that is shown before anybody chose one: the worst. */
function firstOf(cells) {
  const measured = cells.filter((cell) => isKnown(cell.loss?.relative_mse));
  return measured.reduce((worst, cell) => (cell.loss.relative_mse > worst.loss.relative_mse ? cell : worst), measured[0] ?? cells[0])?.layer ?? 0;
}

/** The layer to which a key moves, or null when it means nothing here. */
function moved(layer, key, layers) {
  const steps = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: COLUMNS, ArrowUp: -COLUMNS };
  if (key === "Home") return 0;
  if (key === "End") return layers - 1;
  const to = layer + (steps[key] ?? NaN);
  return to >= 0 && to < layers ? to : null;
}
