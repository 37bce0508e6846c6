// Charts as files: the service gives CSV and SVG; PNG is drawn here, from the SVG.
const SCALE = 2; // Pixels of a PNG to a point of the SVG.

export function button(name, title, act) {
  const made = document.createElement("button");
  made.type = "button";
  made.textContent = name;
  made.title = title;
  made.setAttribute("aria-label", title);
  made.addEventListener("click", act);
  return made;
}

// Downloads a canvas under a name.
export function save(canvas, name) {
  canvas.toBlob((blob) => {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(blob);
    link.download = name;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
  });
}

// The picture behind an address, drawn on a canvas.
export async function drawn(address) {
  const picture = new Image();
  picture.src = address;
  await picture.decode();
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [picture.naturalWidth * SCALE, picture.naturalHeight * SCALE];
  canvas.getContext("2d").drawImage(picture, 0, 0, canvas.width, canvas.height);
  return canvas;
}

// The button beside a link to an SVG file makes a PNG of it. Pages renew parts of themselves: the document listens.
document.addEventListener("click", async (event) => {
  const link = event.target.closest("button.png")?.previousElementSibling;
  if (link) save(await drawn(link.href), `${link.dataset.png}.png`);
});
