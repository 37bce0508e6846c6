// Pictures on a canvas, filled by hand where there are many bars, in the style sheet's colours.
import { KINDS } from "./columns.js";

export const FONT = '11px system-ui, -apple-system, "Segoe UI", Roboto, Arial, sans-serif';

// A picture that is filled by hand: a canvas takes far longer for as many bars. Places are in points.
export class Pixels {
  constructor(width, height) {
    this.ratio = window.devicePixelRatio || 1;
    this.image = new ImageData(Math.max(1, Math.round(width * this.ratio)), Math.max(1, Math.round(height * this.ratio)));
    this.cells = new Uint32Array(this.image.data.buffer);
  }

  fill(x0, x1, y0, y1, colour) {
    const { width, height } = this.image;
    const left = Math.max(0, Math.round(x0 * this.ratio));
    const right = Math.min(width, Math.max(Math.round(x1 * this.ratio), left + 1));
    const below = Math.min(height, Math.round(y1 * this.ratio));
    const cell = cellOf(colour);
    for (let y = Math.max(0, Math.round(y0 * this.ratio)); y < below; y += 1) {
      if (right > left) this.cells.fill(cell, y * width + left, y * width + right);
    }
  }

  put(pen, x, y) {
    pen.putImageData(this.image, Math.round(x * this.ratio), Math.round(y * this.ratio));
  }

  // The same, leaving what is there where nothing was filled in.
  over(pen, x, y) {
    const layer = document.createElement("canvas");
    [layer.width, layer.height] = [this.image.width, this.image.height];
    layer.getContext("2d").putImageData(this.image, 0, 0);
    pen.drawImage(layer, x, y, this.image.width / this.ratio, this.image.height / this.ratio);
  }
}

const cells = new Map();

// A colour of the style sheet, #rrggbb, as a cell of an image.
function cellOf(colour) {
  if (!cells.has(colour)) {
    const [red, green, blue] = [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16));
    const cell = new Uint8ClampedArray([red, green, blue, 255]);
    cells.set(colour, new Uint32Array(cell.buffer)[0]);
  }
  return cells.get(colour);
}

// The canvas at its size in points, as sharp as the screen; its pen.
export function sized(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  const [wide, high] = [Math.round(width * ratio), Math.round(height * ratio)];
  if (canvas.width !== wide) canvas.width = wide;
  if (canvas.height !== high) canvas.height = high;
  Object.assign(canvas.style, { width: `${width}px`, height: `${height}px` });
  const pen = canvas.getContext("2d");
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, width, height);
  pen.font = FONT;
  return pen;
}

export function coloursOf(element) {
  const style = getComputedStyle(element);
  const named = (name) => style.getPropertyValue(`--${name}`).trim();
  const plain = ["card", "lane", "grid", "quiet", "text", "send", "forward", "bad"];
  return { ...Object.fromEntries(plain.map((name) => [name, named(name)])), kinds: KINDS.map(([, name]) => named(name)) };
}
