// Sets the colors before the page is drawn, so this is no module.
"use strict";
{
  const KEY = "outrider.theme";
  const THEMES = ["system", "light", "dark"];
  const show = (theme) => { document.documentElement.dataset.theme = theme; };
  show(localStorage.getItem(KEY) ?? "system");
  addEventListener("DOMContentLoaded", () => {
    const button = document.getElementById("theme");
    if (!button) return;
    const label = () => { button.lastElementChild.textContent = `Colors: ${document.documentElement.dataset.theme}`; };
    button.addEventListener("click", () => {
      const theme = THEMES[(THEMES.indexOf(document.documentElement.dataset.theme) + 1) % THEMES.length];
      localStorage.setItem(KEY, theme);
      show(theme);
      label();
    });
    label();
  });
}
