// Light, dark, or as the system has it. The choice is kept in this browser.

import { byId, setText } from "./dom.js";

const KEY = "paceline-theme";
const CHOICES = ["auto", "light", "dark"];

function chosen() {
  const kept = localStorage.getItem(KEY);
  return CHOICES.includes(kept) ? kept : "auto";
}

function show() {
  document.documentElement.dataset.theme = chosen();
  setText(byId("theme-name"), chosen());
}

export function setUpTheme() {
  show();
  byId("theme").addEventListener("click", () => {
    localStorage.setItem(KEY, CHOICES[(CHOICES.indexOf(chosen()) + 1) % CHOICES.length]);
    show();
  });
}
