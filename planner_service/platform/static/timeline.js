// Timelines on a canvas: every rank a row, below them what each holds; with zoom, pan, and words for each instruction.
// Any element with `data-timeline`, an address of packed columns, becomes one. Where the address holds two timelines, each
// row has two bands: predicted above, measured below.
import { KINDS, firstAfter, labelOf, memoryTicks, pairSentence, sentence, size, timeTicks, twinOf, unpacked } from "./columns.js";
import { button, save } from "./charts.js";
import { FONT, Pixels, coloursOf, sized } from "./pixels.js";

const AXIS = 20;
const TALLEST = 640; // More rows than fit are scrolled through.
const ROWS = { low: 3, high: 40, first: 24, least: 9 }; // Heights of a row, in points.
const LETTER = 6.6;
const MEMORY = 170;
const NEAREST = 1e-7; // The smallest share of the time that is shown.
const UPPER = 0.42; // The share of a row that the predicted band has, and the gap below it.
const BETWEEN = 0.04;
const UPDATE = 8; // The kind whose colour the predicted memory has.

class View {
  constructor(element, timeline, predicted) {
    this.element = element;
    this.timeline = timeline;
    this.predicted = predicted;
    this.span = Math.max(timeline.span, predicted?.span ?? 0);
    this.capacity = Number(element.dataset.capacityBytes ?? 0);
    const peaks = timeline.lanes.map((lane) => lane.most);
    this.most = Math.max(...peaks, ...(predicted?.lanes ?? []).map((lane) => lane.most));
    [this.from, this.to, this.top] = [0, this.span || 1, 0];
    const fitting = Math.floor(TALLEST / timeline.lanes.length);
    const bands = predicted ? 2 : 1;
    this.row = Math.min(ROWS.first * bands, Math.max(ROWS.least * bands, fitting));
    this.chosen = { lane: peaks.indexOf(Math.max(...peaks)), event: null };
    this.build();
    this.schedule();
  }

  build() {
    const { label } = this.element.dataset;
    const { lanes, batches } = this.timeline;
    const tools = document.createElement("div");
    tools.className = "tools";
    for (const [name, title, act] of [
      ["+", "Zoom in", () => this.zoom(0.5)],
      ["−", "Zoom out", () => this.zoom(2)],
      ["←", "Earlier", () => this.pan(-0.25)],
      ["→", "Later", () => this.pan(0.25)],
      ["Whole", "Whole: show all of it", () => this.show(0, this.span)],
      ["Beginning", "Beginning: show how it begins", () => this.show(0, this.readable())],
      ["Taller", "Taller rows", () => this.heighten(1.5)],
      ["Lower", "Lower rows", () => this.heighten(1 / 1.5)],
      ["PNG", "Download what is shown as PNG", () => this.png()],
    ]) tools.append(button(name, title, act));
    this.canvas = document.createElement("canvas");
    this.canvas.tabIndex = 0;
    this.canvas.setAttribute("role", "img");
    this.canvas.setAttribute("aria-label", `${label}: ${lanes.length} ranks, ${batches} batches, ` +
      `${this.span.toPrecision(4)} s. Arrows move and choose a rank, plus and minus zoom, 0 shows all, ` +
      "comma and full stop go from instruction to instruction.");
    this.memory = document.createElement("canvas");
    this.memory.className = "held";
    this.memory.setAttribute("role", "img");
    this.memory.setAttribute("aria-label", `Memory of each rank over time: ${size(this.most)} at most` +
      (this.capacity ? `, of ${size(this.capacity)} that a device has` : ""));
    this.mark = document.createElement("div");
    this.mark.className = "mark";
    this.mark.hidden = true;
    this.tip = document.createElement("div");
    this.tip.className = "tip";
    this.tip.hidden = true;
    this.words = document.createElement("p");
    this.words.className = "quiet words";
    this.words.setAttribute("role", "status");
    this.words.textContent = "Point at an instruction, or choose one with the keys. Drag moves; Ctrl and the wheel zoom.";
    const stack = document.createElement("div");
    stack.className = "stack";
    stack.append(this.canvas, this.mark, this.tip);
    this.element.replaceChildren(legendOf([this.timeline, this.predicted]), tools, stack, this.words);
    if (this.most > 0) this.element.append(this.memory);
    this.listen(stack);
    this.measure();
  }

  listen(stack) {
    const held = new Map();
    this.canvas.addEventListener("pointerdown", (event) => {
      held.set(event.pointerId, event.offsetX);
      this.pressed = event.offsetX;
      this.canvas.setPointerCapture(event.pointerId);
    });
    const release = (event) => held.delete(event.pointerId);
    for (const end of ["pointerup", "pointercancel"]) this.canvas.addEventListener(end, release);
    this.canvas.addEventListener("pointermove", (event) => {
      if (!held.has(event.pointerId)) {
        if (event.pointerType !== "touch") this.point(event.offsetX, event.offsetY);
        return;
      }
      const before = held.get(event.pointerId);
      const other = [...held].find(([id]) => id !== event.pointerId)?.[1];
      held.set(event.pointerId, event.offsetX);
      if (other === undefined) {
        this.pan((before - event.offsetX) / this.width);
        this.scroll(-event.movementY);
      } else if (Math.abs(event.offsetX - other) > 8) {
        this.zoom(Math.abs((before - other) / (event.offsetX - other)), other);
      }
    });
    this.canvas.addEventListener("pointerleave", () => this.unmark());
    this.canvas.addEventListener("click", (event) => {
      if (Math.abs(event.offsetX - this.pressed) < 4) this.choose(event.offsetX, event.offsetY); // else it was moved
    });
    this.canvas.addEventListener("dblclick", (event) => this.zoom(0.25, event.offsetX));
    this.canvas.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.metaKey && !event.shiftKey) return; // the page scrolls
      event.preventDefault();
      if (event.shiftKey) this.pan((event.deltaX || event.deltaY) / this.width);
      else this.zoom(2 ** (event.deltaY / 200), event.offsetX);
    }, { passive: false });
    this.canvas.addEventListener("keydown", (event) => this.press(event));
    new ResizeObserver(() => this.schedule()).observe(stack);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.schedule());
  }

  press(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const acts = {
      ArrowLeft: () => this.pan(-0.1), ArrowRight: () => this.pan(0.1),
      ArrowUp: () => this.chooseLane(-1), ArrowDown: () => this.chooseLane(1),
      "+": () => this.zoom(0.5), "=": () => this.zoom(0.5), "-": () => this.zoom(2),
      0: () => this.show(0, this.span), Home: () => this.pan(-Infinity), End: () => this.pan(Infinity),
      ",": () => this.step(-1), ".": () => this.step(1),
    };
    if (!acts[event.key]) return;
    event.preventDefault();
    acts[event.key]();
  }

  // The room there is, asked for once a picture. The names of the rows take less where there is little.
  measure() {
    this.full = this.canvas.parentElement.clientWidth;
    this.left = this.full < 560 ? 34 : 92;
    this.width = Math.max(1, this.full - this.left);
  }

  get height() { return Math.min(TALLEST, this.timeline.lanes.length * this.row); }
  x(at) { return this.left + ((at - this.from) / (this.to - this.from)) * this.width; }
  at(x) { return this.from + ((x - this.left) / this.width) * (this.to - this.from); }

  // So much of the beginning that its bars can be told apart.
  readable() {
    const busiest = Math.max(1, ...this.timeline.lanes.map((lane) => lane.drawn.length));
    return this.span * Math.min(1, 64 / busiest);
  }

  show(from, to) {
    const whole = this.span || 1;
    const span = Math.min(whole, Math.max(to - from, whole * NEAREST));
    this.from = Math.min(Math.max(0, from), whole - span);
    this.to = this.from + span;
    this.unmark();
    this.schedule();
  }

  zoom(factor, x = this.left + this.width / 2) {
    const centre = this.at(x);
    this.show(centre - (centre - this.from) * factor, centre + (this.to - centre) * factor);
  }

  pan(share) {
    const span = this.to - this.from;
    const far = Math.min(Math.max(share * span, -this.span), this.span);
    this.show(this.from + far, this.to + far);
  }

  scroll(points) {
    const most = this.timeline.lanes.length * this.row - this.height;
    this.top = Math.min(Math.max(0, this.top + points), Math.max(0, most));
    this.schedule();
  }

  heighten(factor) {
    const before = this.row;
    this.row = Math.min(ROWS.high, Math.max(ROWS.low, this.row * factor));
    this.unmark();
    this.scroll(this.top * (this.row / before - 1));
  }

  // The bands of a row so high: each a timeline, its lane, how far below the row's top it begins, and its height.
  bands(index, high) {
    const measured = [this.timeline, this.timeline.lanes[index]];
    if (!this.predicted) return [[...measured, 0, high]];
    const below = high * (UPPER + BETWEEN);
    return [[this.predicted, this.predicted.lanes[index], 0, high * UPPER], [...measured, below, high - below]];
  }

  get high() { return this.row - (this.row > 6 ? Math.min(4, this.row / 5) : 0); }

  // The row, timeline, lane and event at a place; the event is null where the rank has nothing to do.
  under(x, y) {
    const index = Math.floor((y - AXIS + this.top) / this.row);
    if (!this.timeline.lanes[index] || y < AXIS || x < this.left) return null;
    const inside = y - AXIS + this.top - index * this.row;
    const bands = this.bands(index, this.high);
    const [timeline, lane] = bands.findLast(([, , top]) => top <= inside);
    const at = this.at(x);
    const event = lane.drawn[firstAfter(lane, at)];
    return { index, timeline, lane, event: event !== undefined && lane.start[event] <= at ? event : null };
  }

  point(x, y) {
    const found = this.under(x, y);
    if (!found || found.event === null) {
      this.unmark();
      return;
    }
    this.tell(found);
    this.tip.hidden = false;
    this.tip.textContent = this.words.textContent;
    this.tip.style.left = `${Math.min(x + 14, Math.max(0, this.full - 280))}px`;
    this.tip.style.top = `${y + 18}px`;
  }

  // Says what an instruction is, beside what it is in the other timeline, and draws a frame around it.
  tell({ index, timeline, lane, event }) {
    this.words.textContent = this.predicted
      ? pairSentence(this.predicted, this.timeline, index, timeline, event) : sentence(timeline, lane, event);
    const [start, end] = [Math.max(this.left, this.x(lane.start[event])), Math.min(this.full, this.x(lane.end[event]))];
    const [, , below, high] = this.bands(index, this.high).find(([of]) => of === timeline);
    const y = AXIS + index * this.row - this.top + below;
    this.mark.hidden = end < start || y < AXIS || y > AXIS + this.height - 2;
    Object.assign(this.mark.style, {
      left: `${start}px`, top: `${y}px`, width: `${Math.max(2, end - start)}px`, height: `${Math.max(2, high)}px`,
    });
  }

  unmark() {
    this.mark.hidden = true;
    this.tip.hidden = true;
  }

  choose(x, y) {
    const found = this.under(x, y);
    if (!found) return;
    const { index, timeline, event } = found;
    const same = timeline === this.timeline || event === null;
    this.chosen = { lane: index, event: same ? event : twinOf(timeline, this.timeline, index, event) };
    if (event !== null) this.tell(found);
    this.schedule();
  }

  chooseLane(step) {
    const lanes = this.timeline.lanes;
    const index = Math.min(Math.max(0, this.chosen.lane + step), lanes.length - 1);
    this.chosen = { lane: index, event: null };
    const y = index * this.row - this.top;
    this.scroll(Math.min(0, y) + Math.max(0, y + this.row - this.height));
    this.unmark();
    const lane = lanes[index];
    this.words.textContent = `Rank ${lane.rank}: stage ${lane.stage}, replica ${lane.replica}, ` +
      `${lane.drawn.length} instructions that take time, ${size(lane.most)} at most`;
  }

  // Goes to the chosen rank's next instruction that takes time, or to the one before.
  step(by) {
    const lane = this.timeline.lanes[this.chosen.lane];
    if (!lane.drawn.length) return;
    const first = firstAfter(lane, this.from);
    const place = this.chosen.event === null ? first : lane.drawn.indexOf(this.chosen.event) + by;
    const event = lane.drawn[Math.min(Math.max(0, place), lane.drawn.length - 1)];
    this.chosen.event = event;
    if (lane.start[event] < this.from || lane.end[event] > this.to) {
      const half = (this.to - this.from) / 2;
      this.show(lane.start[event] - half, lane.start[event] + half);
    }
    this.tell({ index: this.chosen.lane, timeline: this.timeline, lane, event });
  }

  schedule() {
    if (this.waiting) return;
    this.waiting = requestAnimationFrame(() => {
      this.waiting = 0;
      this.draw();
    });
  }

  draw() {
    this.measure();
    this.colours = coloursOf(this.element);
    this.drawLanes(sized(this.canvas, this.full, AXIS + this.height));
    this.drawHeld(sized(this.memory, this.full, MEMORY));
    this.element.dataset.drawn = "yes";
  }

  axis(pen, height, most) {
    pen.textAlign = "center";
    for (const [at, text] of timeTicks(this.from, this.to, most)) {
      const x = this.x(at);
      pen.fillStyle = this.colours.grid;
      pen.fillRect(x, AXIS - 4, 1, height);
      pen.fillStyle = this.colours.quiet;
      const half = pen.measureText(text).width / 2;
      pen.fillText(text, Math.min(Math.max(x, this.left + half), this.full - half), 11);
    }
  }

  drawLanes(pen) {
    const { lanes } = this.timeline;
    const replicated = lanes.some((lane) => lane.replica);
    const { high } = this;
    this.axis(pen, this.height + 4, Math.max(2, Math.floor(this.width / 110)));
    const pixels = new Pixels(this.width, this.height);
    const labels = [];
    const first = Math.floor(this.top / this.row);
    const shown = [...lanes.entries()].slice(first, first + Math.ceil(this.height / this.row) + 1);
    for (const [index] of shown) {
      const y = index * this.row - this.top;
      for (const [timeline, its, below, tall] of this.bands(index, high)) {
        pixels.fill(0, this.width, y + below, y + below + tall, this.colours.lane);
        this.drawEvents(pixels, timeline, its, y + below, tall, labels);
      }
    }
    pixels.put(pen, this.left, AXIS);
    pen.textAlign = "center";
    pen.fillStyle = "#ffffff";
    for (const [text, x, y] of labels) pen.fillText(text, this.left + x, AXIS + y + 4);
    pen.textAlign = "start";
    if (this.row < 12) pen.font = FONT.replace("11px", "9px");
    for (const [index, lane] of shown) {
      const y = AXIS + index * this.row - this.top + high / 2;
      if (index % Math.ceil(ROWS.least / this.row) || y < AXIS || y > AXIS + this.height) continue;
      pen.fillStyle = index === this.chosen.lane ? this.colours.text : this.colours.quiet;
      const stage = this.left < 60 ? "" : `: stage ${lane.stage}${replicated ? `.${lane.replica}` : ""}`;
      pen.fillText(`${lane.rank}${stage}`, 0, y + 4);
    }
    pen.font = FONT;
  }

  // Bars wider than a point one by one; those that share a point above one another, each as high as it takes time.
  drawEvents(pixels, timeline, lane, y, height, labels) {
    const shares = new Float64Array(KINDS.length);
    let [column, taken] = [-1, 0];
    const flush = () => {
      if (column < 0) return;
      let above = y;
      for (let kind = 0; kind < shares.length; kind += 1) {
        if (!shares[kind]) continue;
        const part = (height * shares[kind]) / Math.max(1, taken);
        pixels.fill(column, column + 1, above, above + part, this.colours.kinds[kind]);
        above += part;
      }
      shares.fill(0);
      [column, taken] = [-1, 0];
    };
    for (let place = firstAfter(lane, this.from); place < lane.drawn.length; place += 1) {
      const event = lane.drawn[place];
      if (lane.start[event] >= this.to) break;
      const start = Math.max(0, this.x(lane.start[event]) - this.left);
      const end = Math.min(this.width, this.x(lane.end[event]) - this.left);
      if (end - start < 1.5) {
        for (let at = Math.floor(start); at < end; at += 1) {
          if (at !== column) flush();
          column = at;
          const share = Math.min(end, at + 1) - Math.max(start, at);
          shares[lane.kind[event]] += share;
          taken += share;
        }
        continue;
      }
      flush();
      pixels.fill(start, end - (end - start > 4 ? 0.7 : 0), y, y + height, this.colours.kinds[lane.kind[event]]);
      if (height < 10 || end - start < 9 || y < -height / 3 || y + height > this.height + 4) continue;
      const label = labelOf(timeline, lane, event);
      if (label && label.length * LETTER + 2 <= end - start) labels.push([label, (start + end) / 2, y + height / 2]);
    }
    flush();
  }

  // What every rank holds, the most in each column of points, and what its device has.
  drawHeld(pen) {
    const [floor, ceiling] = [MEMORY - 8, AXIS + 4];
    const near = this.capacity && this.capacity < 20 * this.most; // a line far above would flatten all others
    const most = 1.08 * Math.max(this.most, near ? this.capacity : 0) || 1;
    const y = (bytes) => floor - ((floor - ceiling) * bytes) / most;
    this.axis(pen, MEMORY - AXIS, Math.max(2, Math.floor(this.width / 110)));
    pen.textAlign = "end";
    for (const [bytes, text] of memoryTicks(most, 4)) {
      pen.fillStyle = this.colours.grid;
      pen.fillRect(this.left, y(bytes), this.width, 1);
      pen.fillStyle = this.colours.quiet;
      if (this.left > 60) pen.fillText(text, this.left - 8, y(bytes) + 4);
    }
    const pixels = new Pixels(this.width, MEMORY);
    for (const lane of this.timeline.lanes) this.drawLine(pixels, lane, y, this.colours.send, 1);
    const { lane } = this.chosen;
    if (this.predicted) this.drawLine(pixels, this.predicted.lanes[lane], y, this.colours.kinds[UPDATE], 2);
    this.drawLine(pixels, this.timeline.lanes[lane], y, this.colours.forward, 2);
    pixels.over(pen, this.left, 0);
    pen.textAlign = "start";
    const write = (words, colour, x, y) => {
      const width = pen.measureText(words).width;
      pen.fillStyle = this.colours.card;
      pen.fillRect(pen.textAlign === "end" ? x - width - 2 : x - 2, y - 11, width + 4, 14);
      pen.fillStyle = colour;
      pen.fillText(words, x, y);
    };
    const rank = this.timeline.lanes[lane].rank;
    write(`bold: rank ${rank}${this.predicted ? ", predicted in orange" : ""}`, this.colours.text, this.left + 4, floor - 5);
    if (!this.capacity) return;
    pen.fillStyle = this.colours.bad;
    if (near) pen.fillRect(this.left, y(this.capacity), this.width, 1.5);
    pen.textAlign = "end";
    const text = `a device has ${size(this.capacity)}${near ? "" : ", far above"}`;
    write(text, this.colours.bad, this.full - 4, near ? y(this.capacity) + 14 : floor - 5); // lines are seldom at 0
  }

  // A line of steps: in each column of points from the least to the most that is held in it. A rank holds its states
  // from the start: before its first instruction is done, the line is where that leaves it.
  drawLine(pixels, lane, y, colour, thick) {
    if (!lane.held) return;
    let [column, low, high, last] = [0, Infinity, -Infinity, lane.held[0] ?? 0];
    const flush = (next) => {
      pixels.fill(column, column + thick, y(high), y(low) + thick, colour);
      if (next > column + 1) pixels.fill(column + 1, next, y(last), y(last) + thick, colour);
    };
    for (let i = 0; i < lane.end.length && lane.end[i] <= this.to; i += 1) {
      const held = lane.held[i];
      if (lane.end[i] >= this.from) {
        const x = Math.floor(this.x(lane.end[i]) - this.left);
        if (low === Infinity) [low, high] = [last, last];
        if (x !== column) {
          flush(x);
          [column, low, high] = [x, last, last];
        }
        [low, high] = [Math.min(low, held), Math.max(high, held)];
      }
      last = held;
    }
    if (low === Infinity) [low, high] = [last, last];
    flush(this.width);
  }

  png() {
    const parts = this.most > 0 ? [this.canvas, this.memory] : [this.canvas];
    const whole = document.createElement("canvas");
    [whole.width, whole.height] = [this.canvas.width, parts.reduce((sum, part) => sum + part.height, 0)];
    const pen = whole.getContext("2d");
    pen.fillStyle = this.colours.card;
    pen.fillRect(0, 0, whole.width, whole.height);
    for (const [index, part] of parts.entries()) pen.drawImage(part, 0, index * this.canvas.height);
    save(whole, `${this.element.dataset.name}.png`);
  }
}

// What the colours stand for: the kinds that occur.
function legendOf(timelines) {
  const lanes = timelines.flatMap((timeline) => timeline?.lanes ?? []);
  const occurring = new Set(lanes.flatMap((lane) => [...new Set(lane.drawn.map((event) => lane.kind[event]))]));
  const list = document.createElement("ul");
  list.className = "legend";
  const entries = KINDS.filter((_, kind) => occurring.has(kind));
  for (const [name, colour] of [...entries, ["Done, or not begun", "lane"]]) {
    const entry = document.createElement("li");
    const chip = document.createElement("span");
    chip.className = `chip ${colour}`;
    entry.append(chip, name);
    list.append(entry);
  }
  return list;
}

async function start(element) {
  try {
    const answer = await fetch(element.dataset.timeline);
    if (!answer.ok) throw new Error(`the service answers ${answer.status}`);
    const columns = await answer.json();
    const { measured = columns, predicted } = columns;
    element.view = new View(element, unpacked(measured), predicted ? unpacked(predicted) : null);
  } catch (error) {
    element.querySelector(".words").textContent = `The timeline cannot be shown: ${error.message}`;
  }
}

document.querySelectorAll("[data-timeline]").forEach(start);
