// Live progress: where a page follows a job or a run, its events move the bar; a change of state shows the page anew.
"use strict";
const KINDS = ["queued", "leased", "succeeded", "failed", "cancelled", "dead", "progress"];
const QUIET_MS = 400; // What happened before comes first, all at once: only the state after it counts.

function follow(element) {
  const shown = element.dataset.state;
  const source = new EventSource(element.dataset.events);
  let settled;
  const take = (event) => {
    const told = JSON.parse(event.data).data;
    show(element, told.progress);
    clearTimeout(settled);
    settled = setTimeout(() => {
      if (told.state && told.state !== shown) {
        source.close();
        location.reload();
      }
    }, QUIET_MS);
  };
  for (const kind of KINDS) source.addEventListener(kind, take);
}

function show(element, progress) {
  if (!progress) return;
  const bar = element.querySelector("progress");
  bar.hidden = false;
  bar.max = Math.max(progress.total, 1);
  bar.value = progress.done;
  const message = progress.message ? `, ${progress.message}` : "";
  element.querySelector(".progress-text").textContent = `${progress.done} of ${progress.total}${message}`;
}

document.querySelectorAll("[data-events]").forEach(follow);
