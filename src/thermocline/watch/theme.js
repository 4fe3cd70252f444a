// Colours before the first paint: the choice of this browser, else that of the system.
"use strict";
(() => {
  let chosen = null;
  try { chosen = localStorage.getItem("thermocline-theme"); } catch { /* storage is blocked */ }
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
})();
