// Live progress: where a page follows a job or a run, its events move the bar; a change of state shows the page anew.
// A part of a page with `data-refresh` is read again every so many seconds, unless it has the focus or is not looked at.
// How long ago something was grows while one looks at it.
// A form with `data-checked` shows there, as one types, what the same form would show that was sent to be checked.
"use strict";
const KINDS = ["queued", "leased", "succeeded", "failed", "cancelled", "dead", "progress"];
const QUIET_MS = 400; // What happened before comes first, all at once: only the state after it counts.

function follow(element) {
  const shown = element.dataset.state;
  const source = new EventSource(element.dataset.events);
  let settled;
  const take = (event) => {
    const told = JSON.parse(event.data).data;
    show(element, told);
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

function show(element, { state, progress }) {
  const bar = element.querySelector("progress");
  if (state === "queued") {
    // What an agent gave up begins anew.
    bar.hidden = true;
    element.querySelector(".progress-text").textContent = "";
  }
  if (state === "queued" || !progress) return;
  bar.hidden = false;
  bar.max = Math.max(progress.total, 1);
  bar.value = progress.done;
  const message = progress.message ? `, ${progress.message}` : "";
  element.querySelector(".progress-text").textContent = `${progress.done} of ${progress.total}${message}`;
}

// Shows a part of the page as the page at an address has it now.
async function renew(element, address) {
  const answer = await fetch(address, { headers: { Accept: "text/html" } }).catch(() => null);
  if (!answer || !answer.ok) return;
  const page = new DOMParser().parseFromString(await answer.text(), "text/html");
  const newer = page.getElementById(element.id);
  if (newer && newer.innerHTML !== element.innerHTML) element.innerHTML = newer.innerHTML;
}

function refresh(element) {
  const again = async () => {
    const rest = document.hidden || element.contains(document.activeElement) || String(getSelection()) !== "";
    if (!rest) await renew(element, location.href);
    setTimeout(again, element.dataset.refresh * 1000);
  };
  setTimeout(again, element.dataset.refresh * 1000);
}

function check(form) {
  let settled;
  form.addEventListener("input", () => {
    clearTimeout(settled);
    settled = setTimeout(() => {
      renew(document.getElementById(form.dataset.checked), `${form.action}?${new URLSearchParams(new FormData(form))}`);
    }, QUIET_MS);
  });
}

// Writes how long ago the page's moments were, as `formats.age` did when the page was made, by the service's clock.
const AGES = [[31557600, "year"], [86400, "day"], [3600, "hour"], [60, "minute"], [1, "second"]];
const AGE_MS = 1000;
const AHEAD_MS = Date.parse(document.body.dataset.now) - Date.now();

function grow() {
  for (const age of document.querySelectorAll("time > .age")) {
    const passed = (Date.now() + AHEAD_MS - Date.parse(age.parentElement.dateTime)) / 1000;
    const [unit, name] = AGES.find(([seconds]) => Math.abs(passed) >= seconds) ?? [1, ""];
    const units = Math.floor(Math.abs(passed) / unit);
    const amount = `${units.toLocaleString("en")} ${name}${units === 1 ? "" : "s"}`;
    const text = !name ? "just now" : passed > 0 ? `${amount} ago` : `in ${amount}`;
    if (age.textContent !== text) age.textContent = text;
  }
}

if (document.body.dataset.now) setInterval(grow, AGE_MS);
document.querySelectorAll("[data-checked]").forEach(check);
document.querySelectorAll("[data-events]").forEach(follow);
document.querySelectorAll("[data-refresh]").forEach(refresh);
