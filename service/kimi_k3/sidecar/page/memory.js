// SPDX-License-Identifier: Apache-2.0
// Where the memory is: planned against actual for each rank, the devices, the control group and the machine.
"use strict";

/**
 * A rank's two bars as parts in bytes. What an older sidecar does not tell is null.
 * `used` is all of the actual bar; what of it is neither weights nor KV cache is `other`, where these are known.
 */
function rankMemory(rank) {
  const { planned = null, reading = null } = rank;
  const actual = rank.actual ?? {};
  const used = actual.used_bytes ?? reading?.used_bytes ?? null;
  const weights = actual.weights_bytes ?? null;
  const cache = actual.kv_cache_bytes ?? null;
  const free = actual.free_bytes ?? null;
  return {
    planned: planned && [
      ["weights", planned.weights_bytes],
      ["step", planned.step_bytes ?? null],
      ["cache", planned.kv_cache_bytes ?? null],
    ],
    // Loading ends before there is a cache: its peak is a mark of its own, not a part of what is kept.
    loading: isKnown(planned?.transient_bytes) ? planned.weights_bytes + planned.transient_bytes : null,
    actual: isKnown(used) || isKnown(weights) || isKnown(cache) ? [
      ["weights", weights],
      ["cache", cache],
      [isKnown(weights) || isKnown(cache) ? "other" : "used", isKnown(used) ? Math.max(0, used - (weights ?? 0) - (cache ?? 0)) : null],
    ] : null,
    used,
    peak: actual.peak_bytes ?? reading?.peak_bytes ?? null,
    total: reading?.total_bytes ?? (isKnown(used) && isKnown(free) ? used + free : null),
    free,
    limit: planned?.limit_bytes ?? null,
    kind: reading?.kind ?? null,
  };
}

/** Of what is known; for a bar's length, not for a figure. */
const partsSum = (parts) => (parts ?? []).reduce((sum, [, bytes]) => sum + (bytes ?? 0), 0);

const PARTS = { weights: "weights", step: "one step of the model", cache: "KV cache", used: "in use", other: "other" };

function memoryView(state) {
  const { memory } = state;
  if (!memory) return null;
  const ranks = memory.ranks.map((rank) => ({ number: rank.rank, ...rankMemory(rank) }));
  // One scale for all, so that ranks compare.
  const scale = Math.max(1, ...ranks.map((rank) => Math.max(rank.total ?? 0, rank.limit ?? 0, rank.peak ?? 0, rank.loading ?? 0, partsSum(rank.planned), partsSum(rank.actual))));
  const planned = ranks.some((rank) => rank.planned);
  return card("memory", "Memory",
    !ranks.length && h("p", { class: "quiet" }, "No rank has reported its memory."),
    ranks.length > 0 && memoryLegend(ranks),
    ranks.length > 0 && h("ul", { class: "ranks memory" }, ranks.map((rank) => rankMemoryView(rank, scale, planned))),
    h("h3", {}, "Devices and machine"),
    h("ul", { class: "ranks places" }, [
      ...(memory.devices ?? []).map((device, index) => placeView(`device-${index}`, device.name, device.vram_used_bytes, device.vram_total_bytes, "")),
      memory.cgroup && placeView("cgroup", "Control group", memory.cgroup.used_bytes, memory.cgroup.limit_bytes, groupWords(memory.cgroup)),
      placeView("host", "Machine", machineUsed(memory.host), memory.host.total_bytes, ""),
    ]),
    !(memory.devices ?? []).length && h("p", { class: "quiet" }, "VRAM: not measured; the machine shows no device of the amdgpu driver."));
}

const machineUsed = ({ total_bytes: total, available_bytes: available }) =>
  isKnown(total) && isKnown(available) ? total - available : null;

function groupWords(group) {
  const use = [["processes", group.use?.anon], ["page cache", group.use?.file], ["shared memory", group.use?.shmem]]
    .filter(([, bytes]) => isKnown(bytes)).map(([name, bytes]) => `, ${name} ${size(bytes)}`).join("");
  const peak = isKnown(group.peak_bytes) ? `, peak ${size(group.peak_bytes)}` : "";
  const kills = isKnown(group.oom_kills) ? `, killed for memory: ${count(group.oom_kills)}` : "";
  return use + peak + kills;
}

function memoryLegend(ranks) {
  const present = Object.keys(PARTS).filter((part) =>
    ranks.some((rank) => [...(rank.planned ?? []), ...(rank.actual ?? [])].some(([name, bytes]) => name === part && isKnown(bytes))));
  return h("ul", { class: "keys" },
    present.map((part) => h("li", {}, h("span", { class: `swatch ${part}`, "aria-hidden": "true" }), PARTS[part])),
    ranks.some((rank) => isKnown(rank.peak)) && h("li", {}, h("span", { class: "swatch peak", "aria-hidden": "true" }), "peak"),
    ranks.some((rank) => isKnown(rank.loading)) && h("li", {}, h("span", { class: "swatch loading", "aria-hidden": "true" }), "planned peak while loading"),
    ranks.some((rank) => isKnown(rank.limit)) && h("li", {}, h("span", { class: "swatch limit", "aria-hidden": "true" }), "limit of the plan"));
}

function rankMemoryView(rank, scale, planned) {
  const told = (words, bytes) => (isKnown(bytes) ? `${words} ${size(bytes, scale)}` : null);
  const list = (...words) => words.flat().filter(Boolean).join(", ");
  const parts = (of) => (of ?? []).filter(([name, bytes]) => name !== "used" && !(name === "other" && bytes === 0)).map(([name, bytes]) => told(PARTS[name], bytes));
  const allPlanned = rank.planned?.every(([, bytes]) => isKnown(bytes)) ? partsSum(rank.planned) : null;
  return h("li", { key: rank.number },
    h("span", { class: "who" }, h("span", { class: "rank" }, `Rank ${rank.number}`),
      rank.kind === "host" && h("span", { class: "quiet" }, "host memory")),
    h("span", { class: "gauge" },
      h("span", { class: "label" }, "Actual ", h("b", {}, isKnown(rank.total) ? sizeOf(rank.used, rank.total) : size(rank.used, scale))), " ",
      h("span", { class: "figures" }, rank.actual ? list(parts(rank.actual), told("peak", rank.peak), told("free", rank.free)) : "not measured"),
      stack(rank.actual, scale, [["peak", rank.peak]])),
    planned && h("span", { class: "gauge planned" },
      h("span", { class: "label" }, "Planned ", h("b", {}, size(allPlanned, scale))), " ",
      h("span", { class: "figures" }, rank.planned ? list(parts(rank.planned), told("peak while loading", rank.loading), told("limit", rank.limit)) : "no plan"),
      stack(rank.planned, scale, [["loading", rank.loading], ["limit", rank.limit]])));
}

/** A bar of several parts with marks on it, all on one scale; for the eye only. */
const stack = (parts, scale, marks) =>
  h("span", { class: `bar stack ${parts ? "" : "blank"}`.trim(), "aria-hidden": "true" },
    (parts ?? []).filter(([, bytes]) => bytes > 0).map(([name, bytes]) => h("span", { key: name, class: `part ${name}`, vars: { "--share": bytes / scale } })),
    marks.filter(([, bytes]) => isKnown(bytes)).map(([name, bytes]) => h("span", { key: name, class: `mark ${name}`, vars: { "--share": bytes / scale } })));

function placeView(key, name, used, total, more) {
  const share = isKnown(used) && total > 0 ? used / total : null;
  return h("li", { key },
    h("span", { class: "who" }, h("span", { class: "rank" }, name)),
    h("span", { class: "gauge" },
      h("span", { class: "label" }, "Used ", h("b", {}, size(used))), " ",
      h("span", { class: "figures" }, isKnown(used) ? `${isKnown(total) ? `of ${size(total)}` : "no limit"}${more}` : "not measured"),
      bar(share)));
}
