// SPDX-License-Identifier: Apache-2.0
// Numbers and moments in words. Every function is pure, and what is unknown becomes an en dash, never 0.
"use strict";

const UNKNOWN = "–";

/** @param {unknown} value @returns {value is number} */
const isKnown = (value) => typeof value === "number" && Number.isFinite(value);

/** 0.431 -> "43 %". 100 % is said only of the whole. @param {number | null | undefined} fraction */
function percent(fraction) {
  if (!isKnown(fraction)) return UNKNOWN;
  return `${fraction >= 1 ? 100 : Math.min(99, Math.floor(fraction * 100))} %`;
}

/**
 * Bytes in the unit that suits `scale`, or themselves. A checkpoint is told in GiB, as devices are.
 * @param {number | null | undefined} bytes
 */
function size(bytes, scale = bytes) {
  if (!isKnown(bytes)) return UNKNOWN;
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  const fits = units.findIndex((_, power) => scale < (power === 3 ? 10 : 1) * 1024 ** (power + 1));
  const power = fits === -1 ? units.length - 1 : fits;
  const value = bytes / 1024 ** power;
  return `${value.toLocaleString("en", { maximumFractionDigits: power && value < 100 ? 1 : 0 })} ${units[power]}`;
}

/** "644 of 1,453 GiB". @param {number | null | undefined} part @param {number | null | undefined} whole */
const sizeOf = (part, whole) =>
  isKnown(part) && isKnown(whole) ? `${size(part, whole).replace(/ .*/, "")} of ${size(whole)}` : `${size(part)} of ${UNKNOWN}`;

/** Seconds, as two units at most: "1 h 5 min", "2 min 3 s", "4 s". @param {number | null | undefined} seconds */
function duration(seconds) {
  if (!isKnown(seconds) || seconds < 0) return UNKNOWN;
  if (seconds > 0 && seconds < 0.95) return `${seconds.toFixed(1)} s`;
  const whole = Math.round(seconds);
  if (whole < 60) return `${whole} s`;
  if (whole < 600) return `${Math.floor(whole / 60)} min${whole % 60 ? ` ${whole % 60} s` : ""}`;
  const minutes = Math.round(seconds / 60);
  if (minutes < 60) return `${minutes} min`;
  const hours = Math.floor(minutes / 60);
  if (hours < 48) return `${hours} h${minutes % 60 ? ` ${minutes % 60} min` : ""}`;
  return `${Math.round(hours / 24)} days`;
}

/** Seconds that nobody knows exactly. @param {number | null | undefined} seconds */
function roughly(seconds) {
  if (!isKnown(seconds)) return null;
  if (seconds < 10) return "a few seconds";
  if (seconds < 55) return `about ${Math.ceil(seconds / 10) * 10} s`;
  return `about ${duration(Math.max(1, Math.round(seconds / 60)) * 60)}`;
}

/** A small ratio with three digits: 0.00462 -> "0.00462", 0.0000123 -> "1.23e-5". @param {number | null | undefined} value */
function ratio(value) {
  if (!isKnown(value)) return UNKNOWN;
  if (value === 0) return "0";
  return value >= 0.0001 ? String(Number(value.toPrecision(3))) : value.toExponential(2);
}

/** 1234567 -> "1,234,567". @param {number | null | undefined} value */
const count = (value) => (isKnown(value) ? value.toLocaleString("en") : UNKNOWN);

/** "1 rank", "2 ranks". @param {number} number @param {string} one */
const several = (number, one) => `${count(number)} ${one}${number === 1 ? "" : "s"}`;

/** The last part of a path. @param {string} path */
const lastPart = (path) => path.replace(/\/+$/, "").split("/").pop() || path;

const SEVERITY = { critical: "Critical", warning: "Warning" };

/** Phases in the order of a start, and the word for a deployment that is in one. */
const PHASES = {
  pending: "Waiting to start",
  preflight: "Checking",
  downloading: "Downloading",
  loading: "Loading",
  converting: "Converting",
  compiling: "Compiling",
  capturing: "Capturing graphs",
  warming: "Warming up",
  ready: "Ready",
  draining: "Draining",
  stopped: "Stopped",
  failed: "Failed",
};
const PHASE_ORDER = Object.keys(PHASES);
const STARTING = PHASE_ORDER.slice(0, PHASE_ORDER.indexOf("ready"));
const ENDED = ["stopped", "failed"];

/** The phase in a word. Without conversion that phase only puts weights into place. */
function phaseWord(/** @type {string | null | undefined} */ phase, lossy = true) {
  if (!phase) return UNKNOWN;
  if (phase === "converting" && lossy === false) return "Placing weights";
  return PHASES[phase] ?? phase;
}
