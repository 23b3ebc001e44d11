// SPDX-License-Identifier: Apache-2.0
// The bridge between views and the document: views describe elements, `show` makes the document look so.
// Elements that stay are kept, so that focus, what was typed and where a reader is survive every change. Text is
// only ever set as text; nothing that the sidecar says is read as HTML.
"use strict";

/**
 * @typedef {{ tag: string, attributes: Record<string, any>, children: (Described | string)[] }} Described
 */

/**
 * Describe an element. `null`, `false` and `undefined` among attributes and children are left out; `vars` are
 * custom properties for the style sheet; `key` tells siblings apart.
 * @returns {Described}
 */
function h(/** @type {string} */ tag, attributes = {}, ...children) {
  const kept = children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false);
  return { tag, attributes, children: kept.map((child) => (typeof child === "object" ? child : String(child))) };
}

/** Make `parent` hold just what is described. @param {Element} parent @param {(Described | string | null)[]} wanted */
function show(parent, wanted) {
  const list = wanted.filter((want) => want !== null);
  list.forEach((want, index) => {
    const have = matching(parent, index, want);
    if (have === null) parent.insertBefore(made(want), parent.childNodes[index] ?? null);
    else if (typeof want === "string") have.data !== want && (have.data = want);
    else dress(have, want);
  });
  while (parent.childNodes.length > list.length) parent.lastChild.remove();
}

/** The child at `index` if it can become `want`. What stands before a later match is removed. */
function matching(parent, index, want) {
  for (let at = index; at < parent.childNodes.length; at += 1) {
    const child = parent.childNodes[at];
    if (suits(child, want)) {
      for (; at > index; at -= 1) parent.childNodes[index].remove();
      return child;
    }
    if (typeof want === "string" || want.attributes.key === undefined) return null;
  }
  return null;
}

function suits(node, want) {
  if (typeof want === "string") return node.nodeType === Node.TEXT_NODE;
  return node.localName === want.tag && (node.kimiKey ?? undefined) === want.attributes.key;
}

function made(want) {
  if (typeof want === "string") return document.createTextNode(want);
  const element = document.createElement(want.tag);
  dress(element, want);
  return element;
}

function dress(element, { attributes, children }) {
  const { key, vars = {}, ...wanted } = attributes;
  if (key !== undefined) element.kimiKey = key;
  for (const { name } of [...element.attributes]) {
    if (name !== "style" && !isSet(wanted[name])) element.removeAttribute(name);
  }
  for (const [name, value] of Object.entries(wanted)) {
    const text = value === true ? "" : String(value);
    if (isSet(value) && element.getAttribute(name) !== text) element.setAttribute(name, text);
  }
  for (const [name, value] of Object.entries(vars)) {
    if (element.style.getPropertyValue(name) !== String(value)) element.style.setProperty(name, String(value));
  }
  show(element, children);
}

const isSet = (value) => value !== null && value !== undefined && value !== false;

/** A card: a region of the page with its heading. */
const card = (id, title, ...children) =>
  h("section", { key: id, id, class: "card", "aria-labelledby": `${id}-title` }, h("h2", { id: `${id}-title` }, title), children);

/** A bar, for the eye only: what it says must stand beside it as text. `share` is 0 to 1, or null when unknown. */
const bar = (share, kind = "") =>
  h("span", { class: `bar ${kind} ${isKnown(share) ? "" : "blank"}`.trim(), "aria-hidden": "true" },
    h("span", { class: "fill", vars: { "--share": isKnown(share) ? Math.min(1, Math.max(0, share)) : 0 } }));

/** How long something has lasted; exact for who hovers or parses. */
const lasting = (state, iso, wall, after = "") =>
  iso ? h("time", { datetime: iso, title: iso }, `${duration(secondsAgo(state, iso, wall))}${after}`) : "an unknown time";

/** How long ago a moment was. */
const moment = (state, iso, wall) => lasting(state, iso, wall, " ago");
