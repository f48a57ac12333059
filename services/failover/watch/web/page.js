// Fetches the page anew and replaces what it shows; what was opened stays open.
"use strict";
const seconds = Number(document.body.dataset.seconds);
async function refresh() {
  try {
    const answer = await fetch(location.pathname, { cache: "no-store" });
    const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
    const main = fresh.querySelector("main");
    for (const opened of document.querySelectorAll("details[open]")) {
      const same = main.querySelector(`details[data-run="${CSS.escape(opened.dataset.run)}"]`);
      if (same) same.open = true;
    }
    document.querySelector("main").replaceWith(main);
    document.title = fresh.title;
    document.body.classList.remove("stale");
  } catch {
    document.body.classList.add("stale");
  }
}
setInterval(refresh, seconds * 1000);
