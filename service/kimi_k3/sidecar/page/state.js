// SPDX-License-Identifier: Apache-2.0
// What the page knows, and how each answer of the sidecar changes it. Everything here is pure: a state and an
// answer give a new state. The views read nothing else.
"use strict";

/**
 * What the page knows. `status`, `startup`, ... are the sidecar's last answers as they came, `null` before.
 * `at` says when each came, in milliseconds of the page's own clock, which never goes back.
 */
const NOTHING = {
  status: null,
  startup: null,
  readiness: null,
  conversion: null,
  memory: null,
  warnings: null,
  /** Merged loss by "layer/projection". @type {Record<string, object>} */
  converted: {},
  at: {},
  /** When the sidecar last said anything. @type {number | null} */
  heard: null,
  /** Whether it answers: null before it was asked. @type {boolean | null} */
  answers: null,
  /** Whether changes come by themselves (SSE) or are asked for. */
  streaming: false,
  /** Whether a token is asked for, and whether one was refused. */
  locked: false,
  refused: false,
  /** Difference of the sidecar's wall clock from this machine's, in milliseconds. */
  skew: 0,
  /** The warning whose acknowledgement is being written, and what came of the last one. */
  writing: null,
  trouble: null,
  /** Kinds whose last answer this page does not understand. @type {string[]} */
  strange: [],
};

/** What an answer must have to be shown; a page that is left open may outlive its sidecar's version. */
const NEEDED = {
  startup: ["phase", "description", "ranks"],
  readiness: ["ready", "reasons"],
  status: ["deployment", "history", "weights", "failures", "versions"],
  conversion: ["layers", "note"],
  converted: ["layer", "projection", "ranks_done"],
  memory: ["ranks", "host"],
  warnings: ["warnings"],
};

/** One answer of `kind`, read at `now`. An unknown kind changes nothing but that the sidecar was heard. */
function received(state, kind, data, now, wall) {
  const strange = state.strange.filter((one) => one !== kind);
  const heard = { ...state, heard: now, answers: true, strange };
  if (!(NEEDED[kind] ?? []).every((key) => data && typeof data === "object" && key in data)) {
    return { ...heard, strange: [...strange, kind] };
  }
  const stamped = (change) => ({ ...heard, ...change, at: { ...state.at, [kind]: now } });
  switch (kind) {
    case "status":
      return stamped({ ...afterRestart(state, data), status: data, skew: clockSkew(data, wall) ?? state.skew });
    case "conversion":
      return stamped({ conversion: data, converted: merged(state.converted, data.layers.map(layerLoss)) });
    case "converted":
      return stamped({ converted: merged(state.converted, [data]) });
    case "startup":
    case "readiness":
    case "memory":
      return stamped({ [kind]: data });
    case "warnings":
      return stamped({ warnings: data.warnings });
    default:
      return heard;
  }
}

/** The sidecar did not answer. What is known stays, but the views no longer call it live. */
const unanswered = (state) => ({ ...state, answers: false, streaming: false });

/** Nothing of an earlier start may be shown as the present one's. */
function afterRestart(state, status) {
  const before = state.status?.deployment?.start_id;
  const restarted = before !== undefined && before !== status.deployment?.start_id;
  return restarted ? { converted: {}, conversion: null, memory: null, startup: null, readiness: null } : {};
}

/** What is wrong with this machine's clock, by the sidecar's; null when that cannot be told. */
function clockSkew(status, wall) {
  const deployment = status.deployment;
  if (!deployment || !isKnown(deployment.age_seconds)) return null;
  return Date.parse(deployment.updated_at) + deployment.age_seconds * 1000 - wall;
}

/** One row of /conversion in the form of the event `converted`. */
const layerLoss = (layer) => ({
  layer: layer.layer,
  projection: layer.projection,
  relative_mse: layer.relative_mse,
  max_error: layer.max_error,
  lossless_ratio: layer.lossless_ratio,
  ranks_done: layer.ranks.length,
  ranks_expected: layer.ranks.length + layer.missing_ranks.length,
});

/** Ranks only add to a layer, so of two reports the one of more ranks is the later one. */
function merged(known, fresh) {
  const together = { ...known };
  for (const one of fresh) {
    const key = `${one.layer}/${one.projection}`;
    if (!together[key] || together[key].ranks_done <= one.ranks_done) together[key] = one;
  }
  return together;
}

/** Seconds since `kind` was last answered. */
const secondsSince = (state, kind, now) => (state.at[kind] === undefined ? null : (now - state.at[kind]) / 1000);

/** How much the deployment can be believed: "none", "lost" (no answer), "stale" (supervisor silent) or "live". */
function liveness(state) {
  if (state.answers === null && state.heard === null) return "none";
  if (state.answers === false) return "lost";
  const deployment = state.status?.deployment;
  if (deployment && !deployment.fresh && !deployment.ending) return "stale";
  return "live";
}

/** Seconds since what is shown was true; null when that is now, or not known. */
function silence(state, now) {
  const kind = liveness(state);
  const age = state.status?.deployment?.age_seconds;
  if (kind === "lost") return state.heard === null ? null : (now - state.heard) / 1000;
  if (kind === "stale" && isKnown(age)) return age + secondsSince(state, "status", now);
  return null;
}

/** Seconds from a moment of the sidecar's clock until now; null when unknown. */
function secondsAgo(state, moment, wall) {
  const then = moment ? Date.parse(moment) : NaN;
  return Number.isNaN(then) ? null : Math.max(0, (wall + state.skew - then) / 1000);
}

/** Whether the experts differ from the checkpoint's values; null when nobody has said. */
const isLossy = (state) => state.status?.weights?.lossy ?? null;

/** The present phase, by whichever answer is the newest. */
function phaseOf(state) {
  const [newest] = ["startup", "status", "readiness"]
    .filter((kind) => state[kind])
    .sort((one, other) => (state.at[other] ?? 0) - (state.at[one] ?? 0));
  return newest ? state[newest].phase : null;
}

/** A duration that was `seconds` long when `kind` was answered, and goes on while the deployment lives. */
function running(state, kind, seconds, now, direction = 1) {
  if (!isKnown(seconds)) return null;
  const ticking = liveness(state) === "live" && !state.status?.deployment?.ending;
  return Math.max(0, seconds + (ticking ? direction * (secondsSince(state, kind, now) ?? 0) : 0));
}

/** The ranks that report here: all to the first node, to another one its own. */
function knownRanks(state) {
  const { world_size: world = 0, nodes = 1, node = 0 } = state.status?.deployment ?? {};
  const each = Math.floor(world / nodes);
  return node ? Array.from({ length: each }, (_, index) => node * each + index) : [...Array(world).keys()];
}

/** Ranks that shall report and those beyond that report all the same, each with its progress or null. */
function rankRows(state) {
  const reported = state.startup?.ranks ?? [];
  const numbers = new Set([...knownRanks(state), ...reported.map((rank) => rank.rank)]);
  return [...numbers]
    .sort((one, other) => one - other)
    .map((number) => ({ number, progress: reported.find((rank) => rank.rank === number) ?? null }));
}
