// Building and updating elements. Text is only ever set as text.

const SVG = "http://www.w3.org/2000/svg";

export const byId = (id) => document.getElementById(id);

// el("p", { class: "hint" }, "text", child, ...): an HTML element. Attributes that are null or false are left out.
export function el(tag, attributes = {}, ...children) {
  return furnished(document.createElement(tag), attributes, children);
}

export function svg(tag, attributes = {}, ...children) {
  return furnished(document.createElementNS(SVG, tag), attributes, children);
}

// Set a text only where it differs, so that a selection and a screen reader's place in it stay.
export function setText(element, text) {
  if (element.textContent !== String(text)) element.textContent = text;
}

export function setShare(element, share) {
  element.style.setProperty("--share", String(Math.max(0, Math.min(1, share || 0))));
}

// Make the children of `parent` those of `items`, in order, and keep the elements of items that stay.
// key(item): unique. create(item): a new element. update(element, item): called for each.
export function sync(parent, items, key, create, update) {
  const known = parent.syncedElements ?? new Map();
  const wanted = new Map();
  let at = parent.firstElementChild;
  for (const item of items) {
    const element = known.get(key(item)) ?? create(item);
    wanted.set(key(item), element);
    update(element, item);
    if (element === at) at = at.nextElementSibling;
    else parent.insertBefore(element, at);
  }
  for (const [name, element] of known) if (wanted.get(name) !== element) element.remove();
  parent.syncedElements = wanted;
}

// Whether the end of what an element shows is in sight, to within two lines.
export function isAtEnd(element) {
  return element.scrollHeight - element.scrollTop - element.clientHeight < 48;
}

// Tell a screen reader, without moving the focus.
export function announce(text) {
  setText(byId("announcer"), text);
}

function furnished(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === true) element.setAttribute(name, "");
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}
