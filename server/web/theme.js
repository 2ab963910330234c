// The colour theme: the system's, unless the reader chose one. Loaded before the first paint.
"use strict";

(() => {
  const THEMES = ["automatic", "light", "dark"];
  const KEY = "voxlite-theme";
  const root = document.documentElement;

  function stored() {
    try {
      const theme = localStorage.getItem(KEY);
      return THEMES.includes(theme) ? theme : "automatic";
    } catch {
      return "automatic"; // Storage may be forbidden; the system's theme is then the only one.
    }
  }

  function apply(theme) {
    root.dataset.theme = theme;
    document.getElementById("theme")?.setAttribute("aria-label", `Theme: ${theme}`);
    document.getElementById("theme")?.setAttribute("title", `Theme: ${theme}`);
    document.dispatchEvent(new Event("themechange"));
  }

  apply(stored());

  document.addEventListener("DOMContentLoaded", () => {
    apply(root.dataset.theme);
    document.getElementById("theme").addEventListener("click", () => {
      const next = THEMES[(THEMES.indexOf(root.dataset.theme) + 1) % THEMES.length];
      try {
        localStorage.setItem(KEY, next);
      } catch {
        // It holds until the page is left.
      }
      apply(next);
    });
  });
})();
