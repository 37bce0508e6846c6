"""Scripts that tests evaluate in pages of the dashboard."""

VIEW = "document.querySelector('[data-timeline]').view"

WORDS = "document.querySelector('.words').textContent"

LEGEND = "[...document.querySelectorAll('.timeline .legend li')].map((entry) => entry.textContent)"

COLOURS = """(() => {
  const canvas = document.querySelector(".timeline canvas");
  const named = (name) => getComputedStyle(canvas).getPropertyValue(name).trim();
  const cells = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
  const counted = (colour) => {
    const [red, green, blue] = [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16));
    let count = 0;
    for (let i = 0; i < cells.length; i += 4) {
      count += cells[i] === red && cells[i + 1] === green && cells[i + 2] === blue;
    }
    return count;
  };
  return { forward: counted(named("--forward")), backward: counted(named("--backward")) };
})()"""
"""How many points of the timeline's picture have the colour of each kind."""

OVERFLOWING = """[...document.querySelectorAll(".fits")]
  .filter((list) => list.scrollWidth > list.clientWidth)
  .map((list) => `${list.getAttribute("aria-label")} ${list.scrollWidth} > ${list.clientWidth}`)"""
"""The lists that can be scrolled sideways."""

UNTIL = """new Promise((resolve, reject) => {
  const give = setTimeout(() => reject(new Error("never")), 20000);
  const look = () => { if (%s) { clearTimeout(give); resolve(true); } else setTimeout(look, 20); };
  look();
})"""

CONTRASTS = """(() => {
  const parsed = (colour) => {
    const [r, g, b, a] = colour.match(/[\\d.]+/g).map(Number);
    return { rgb: [r, g, b], opaque: (a ?? 1) === 1 };
  };
  const light = (rgb) => {
    const [r, g, b] = rgb.map((c) => (c / 255 <= 0.03928 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (element) => {
    const back = parsed(getComputedStyle(element).backgroundColor);
    return back.opaque ? back.rgb : behind(element.parentElement);
  };
  const written = (element) => [...element.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
  const ratio = (element) => {
    const colour = parsed(getComputedStyle(element).color).rgb;
    const [less, more] = [light(colour), light(behind(element))].sort((x, y) => x - y);
    return (more + 0.05) / (less + 0.05);
  };
  return [...document.querySelectorAll("body *:not(svg, svg *)")]
    .filter((element) => written(element) && element.checkVisibility() && ratio(element) < 4.5)
    .map((element) => `${element.tagName}.${element.className} ${ratio(element).toFixed(2)}`);
})()"""
"""What has text of less contrast than WCAG 2.1's 4.5 to 1."""

MISNAMED = """(() => {
  const named = [...document.querySelectorAll("[role=region], nav, header, main")];
  const names = named.map((each) => `${each.tagName} ${each.getAttribute("aria-label") ?? ""}`);
  const twice = names.filter((name, at) => names.indexOf(name) !== at).map((name) => `twice: ${name}`);
  const words = (text) => text.toLowerCase().match(/[a-z]+/g)?.join(" ") ?? "";
  const hidden = [...document.querySelectorAll("button[aria-label], a[aria-label]")]
    .filter((each) => !words(each.getAttribute("aria-label")).includes(words(each.textContent)))
    .map((each) => `${each.textContent} is not in ${each.getAttribute("aria-label")}`);
  return [...twice, ...hidden];
})()"""
"""Landmarks that share a name, and controls whose names do not hold what they show (WCAG 2.5.3)."""

UNREACHABLE = """(() => {
  for (const each of document.querySelectorAll("details")) each.open = true;
  return [...document.querySelectorAll("main *")]
    .filter((each) => ["auto", "scroll"].includes(getComputedStyle(each).overflowX))
    .filter((each) => each.scrollWidth > each.clientWidth && each.tabIndex < 0)
    .filter((each) => !each.querySelector("a, button, input, select, [tabindex='0']"))
    .map((each) => `${each.tagName}.${each.className}`);
})()"""
"""What can be scrolled sideways, but not with keys: no focus gets there."""
