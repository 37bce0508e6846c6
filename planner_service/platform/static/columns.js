// Timelines as `pipeplan.programs.timeline_columns` packs them: read into typed arrays, searched, put into words.
"use strict";

export const KINDS = [
  ["Forward", "forward"],
  ["Recompute", "recompute"],
  ["Backward", "backward"],
  ["Backward, input", "backward-input"],
  ["Backward, weights", "backward-weight"],
  ["Gradient exchange", "reduce"],
  ["Gradients of shared weights", "reduce"],
  ["Gradient norm", "reduce"],
  ["Update", "update"],
  ["Checkpoint", "checkpoint"],
  ["Send", "send"],
  ["Waiting for data (bubble)", "receive"],
]; // The name of each kind and its colour's variable, in the legend's order.
const HEADS = { F: 0, R: 1, B: 2, I: 3, W: 4, G: 5, S: 5, T: 6, N: 7, U: 8, C: 9, ">F": 10, ">B": 10, "<F": 11, "<B": 11 };
const OF_MICROBATCHES = 4; // The kinds up to this one have microbatches; the others but transfers have a version.
const FIRST_TRANSFER = 10;

// The lanes, each with its events as columns. `drawn` are the places of the events that take time. `held` is null where
// the bytes are unknown.
export function unpacked(columns) {
  const kinds = columns.words.map(([head]) => HEADS[head]);
  const lanes = columns.lanes.map((packed) => {
    const count = packed.words.length;
    const lane = {
      rank: packed.rank, stage: packed.stage, replica: packed.replica, words: packed.words,
      kind: new Uint8Array(count), number: new Int32Array(count), held: packed.held.length < count ? null : new Float64Array(count),
      start: new Float64Array(count), end: new Float64Array(count),
    };
    const last = {};
    const drawn = [];
    let [ticks, held] = [0, 0];
    for (let i = 0; i < count; i += 1) {
      const [head] = columns.words[packed.words[i]];
      last[head] = (last[head] ?? 0) + packed.numbers[i];
      lane.number[i] = last[head];
      lane.kind[i] = kinds[packed.words[i]];
      ticks += packed.gaps[i];
      lane.start[i] = ticks * columns.tick_s;
      ticks += packed.durations[i];
      lane.end[i] = ticks * columns.tick_s;
      if (lane.held) {
        held += packed.held[i];
        lane.held[i] = held;
      }
      if (packed.durations[i] > 0) drawn.push(i);
    }
    lane.drawn = Uint32Array.from(drawn);
    lane.most = (lane.held ?? []).reduce((most, each) => Math.max(most, each), 0);
    return lane;
  });
  const span = Math.max(0, ...lanes.map((lane) => lane.end[lane.end.length - 1] ?? 0));
  return { lanes, words: columns.words, span, batches: columns.batches };
}

// The place in `drawn` of the first event that ends after the moment; events of a lane follow one another.
export function firstAfter(lane, moment) {
  let [low, high] = [0, lane.drawn.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (lane.end[lane.drawn[middle]] > moment) high = middle;
    else low = middle + 1;
  }
  return low;
}

// The instruction's text form.
export function textOf(timeline, lane, i) {
  const [head, tail] = timeline.words[lane.words[i]];
  return head + lane.number[i] + tail;
}

// What stands on an instruction's bar: its microbatches; of what concerns the whole stage its version.
export function labelOf(timeline, lane, i) {
  if (lane.kind[i] >= FIRST_TRANSFER) return "";
  return lane.number[i] + (timeline.words[lane.words[i]][1].match(/^(,\d+)+/)?.[0] ?? "");
}

// What an instruction is and when, in a sentence.
export function sentence(timeline, lane, i) {
  const kind = lane.kind[i];
  const tail = timeline.words[lane.words[i]][1];
  const numbers = labelOf(timeline, lane, i) || String(lane.number[i]);
  let what = `${KINDS[kind][0]} for weight version ${lane.number[i]}`;
  if (kind <= OF_MICROBATCHES) {
    const [, chunk] = tail.match(/\.(\d+)/) ?? [];
    const of = numbers.includes(",") ? "microbatches" : "microbatch";
    what = `${KINDS[kind][0]} of ${of} ${numbers} on weight version ${tail.match(/@(\d+)/)?.[1] ?? 0}`;
    if (chunk) what += `, chunk ${chunk}`;
  } else if (kind >= FIRST_TRANSFER) {
    const peer = tail.match(/:(\d+)/)?.[1] ?? "";
    const gradient = timeline.words[lane.words[i]][0].endsWith("B");
    const cargo = `${gradient ? "gradient" : "activation"} of microbatch ${numbers}`;
    what = kind === FIRST_TRANSFER ? `Sends the ${cargo} to rank ${peer}` : `Waits for the ${cargo} from rank ${peer} (bubble)`;
  }
  const [start, end] = [lane.start[i], lane.end[i]];
  return `Rank ${lane.rank}, ${textOf(timeline, lane, i)}: ${what}; ${seconds(end - start)}, from ${moment(start)} ` +
    `to ${moment(end)}; ${lane.held ? `then holds ${size(lane.held[i])}` : "what it then holds is unknown"}`;
}

// The place in another timeline of the same instruction of a lane; null where that does not have it.
export function twinOf(timeline, other, index, i) {
  const lane = other.lanes[index];
  lane.places ??= new Map(Array.from(lane.words, (_, at) => [textOf(other, lane, at), at]));
  return lane.places.get(textOf(timeline, timeline.lanes[index], i)) ?? null;
}

// An instruction of a run in a sentence, as measured, and how that is from what was predicted.
export function pairSentence(predicted, measured, index, timeline, i) {
  const same = timeline === measured;
  const twin = twinOf(timeline, same ? predicted : measured, index, i);
  const [seen, expected] = same ? [i, twin] : [twin, i];
  if (seen === null) return `Predicted only. ${sentence(predicted, predicted.lanes[index], expected)}`;
  const words = sentence(measured, measured.lanes[index], seen);
  if (expected === null) return `${words}; it was not predicted`;
  const [its, was] = [measured.lanes[index], predicted.lanes[index]];
  const [took, meant] = [its.end[seen] - its.start[seen], was.end[expected] - was.start[expected]];
  const change = meant > 0 ? ` (${took < meant ? "−" : "+"}${number((100 * Math.abs(took - meant)) / meant)} %)` : "";
  return `${words}; predicted ${seconds(meant)}${change}, from ${moment(was.start[expected])}`;
}

const TIMES = [[1, "s"], [1e-3, "ms"], [1e-6, "µs"]];
const SIZES = [[2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]];

function number(value) {
  if (Math.abs(value) >= 100) return Math.round(value).toLocaleString("en-US");
  return String(Number(value.toPrecision(3)));
}

function inUnits(value, units, smallest) {
  const [unit, name] = units.find(([each]) => Math.abs(value) >= each) ?? smallest;
  return `${number(value / unit)} ${name}`;
}

export const seconds = (value) => (value === 0 ? "0 s" : inUnits(value, TIMES, TIMES[2]));
export const size = (value) => inUnits(value, SIZES, [1, "B"]);

// A moment, with enough digits to tell two instructions apart.
function moment(value) {
  const [unit, name] = TIMES.find(([each]) => value >= each) ?? TIMES[0];
  return `${Number((value / unit).toPrecision(7))} ${name}`;
}

// Round values within [low, high], at most so many, and their labels by `scale`: units, and one for all of them.
export function ticks(low, high, most, units) {
  if (!(high > low)) return [];
  const [unit, name] = units.find(([each]) => high >= each) ?? units[units.length - 1];
  const rough = (high - low) / unit / most;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((each) => each >= rough * (1 - 1e-9));
  const digits = Math.min(20, Math.max(0, -Math.floor(Math.log10(step) + 1e-9)));
  const found = [];
  for (let k = Math.ceil(low / unit / step - 1e-9); k * step * unit <= high * (1 + 1e-12); k += 1) {
    found.push([k * step * unit, `${(k * step).toFixed(digits)} ${name}`]);
  }
  return found;
}

export const timeTicks = (low, high, most) => ticks(low, high, most, TIMES);
export const memoryTicks = (high, most) => ticks(0, high, most, [...SIZES, [1, "B"]]);
