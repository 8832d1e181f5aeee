// The theme, before anything is painted: the system's, unless the reader chose another one.
"use strict";

(() => {
  const CHOICES = ["system", "light", "dark"];
  const NAME = "headrace-theme";

  const stored = () => {
    try {
      return CHOICES.includes(localStorage.getItem(NAME)) ? localStorage.getItem(NAME) : "system";
    } catch {
      return "system"; // storage may be forbidden
    }
  };

  const apply = (choice) => {
    if (choice === "system") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = choice;
  };

  let choice = stored();
  apply(choice);

  document.addEventListener("DOMContentLoaded", () => {
    const button = document.getElementById("theme-button");
    const show = () => {
      button.lastChild.textContent = choice;
      button.setAttribute("aria-label", `Theme: ${choice}`);
    };
    show();
    button.addEventListener("click", () => {
      choice = CHOICES[(CHOICES.indexOf(choice) + 1) % CHOICES.length];
      apply(choice);
      show();
      try {
        localStorage.setItem(NAME, choice);
      } catch {
        // it then lasts until the page is left
      }
    });
  });
})();
