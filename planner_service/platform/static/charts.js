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

// Every link to an SVG file gets a button beside it that makes a PNG of it.
for (const link of document.querySelectorAll("a[data-png]")) {
  const name = link.dataset.png;
  link.after(button("PNG", `Download ${name} as PNG`, async () => save(await drawn(link.href), `${name}.png`)));
}
