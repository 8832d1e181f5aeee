// Building elements. Text becomes text nodes, never markup, whoever wrote it.

export const byId = (id) => document.getElementById(id);

/** An element; `props` are attributes, `class` among them, or listeners (functions under the event's name). */
export function el(tag, props = {}, ...children) {
  return filled(document.createElement(tag), props, children);
}

export function svg(tag, props = {}, ...children) {
  return filled(document.createElementNS("http://www.w3.org/2000/svg", tag), props, children);
}

function filled(node, props, children) {
  for (const [name, value] of Object.entries(props)) {
    if (typeof value === "function") node.addEventListener(name, value);
    else if (value !== false && value !== null && value !== undefined) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

/** Set the text if it is another one, so that nothing is announced or selected anew without need. */
export function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** A badge's text and its colour ("", "good", "warn" or "bad"). */
export function badge(node, text, tone = "") {
  say(node, text);
  node.className = `badge ${tone}`.trim();
}

/** What came of something the reader did. */
export function outcome(node, text, isBad = false) {
  say(node, text);
  node.classList.toggle("bad", isBad);
}
