// Three conveniences; the page is complete without them: pictures that save on a click, values read off a chart, and a
// slider over training steps.
"use strict";

for (const link of document.querySelectorAll(".picture a")) link.href = link.querySelector("img").src;

const SVG = "http://www.w3.org/2000/svg";

for (const svg of document.querySelectorAll("figure.chart svg[data-scales]")) {
  const figure = svg.closest("figure");
  const scales = JSON.parse(svg.dataset.scales);
  const colors = [...svg.querySelectorAll("path.line")].map((path) => path.style.stroke);
  let header, points;
  let chosen = -1;
  if (svg.dataset.moving) {
    const moving = JSON.parse(svg.dataset.moving);
    header = moving.header;
    svg.addEventListener("step", (event) => take(moving, event.detail));
    take(moving, moving.frames.length - 1);
  } else {
    const [first, ...rows] = parseCsv(figure.querySelector('a[download$=".csv"]').href);
    header = first;
    points = rows
      .map((row) => ({ x: Number(row[0]), cells: row.slice(1) }))
      .filter((point) => Number.isFinite(point.x) && (point.x > 0 || !scales.x.log));
  }
  const box = document.createElement("div");
  box.className = "reading";
  box.hidden = true;
  figure.append(box);
  const rule = document.createElementNS(SVG, "line");
  rule.setAttribute("class", "rule");
  rule.setAttribute("y1", scales.y.pixels[0]);
  rule.setAttribute("y2", scales.y.pixels[1]);
  rule.style.display = "none";
  svg.prepend(rule);
  function take(moving, step) {
    points = moving.x.map((x, i) => ({ x, cells: moving.frames[step].map((line) => line[i] ?? "") }));
    if (chosen >= 0) show(chosen);
  }

  function show(index) {
    chosen = index;
    const point = points[index];
    const at = place(scales.x, point.x);
    rule.setAttribute("x1", at);
    rule.setAttribute("x2", at);
    rule.style.display = "";
    box.replaceChildren(line(`${header[0]} ${format(point.x)}`));
    point.cells.forEach((cell, i) => {
      if (cell !== "") box.append(line(`${header[i + 1]}: ${format(Number(cell))}`, colors[i]));
    });
    box.hidden = false;
    const drawing = svg.getBoundingClientRect();
    const outer = figure.getBoundingClientRect();
    const x = drawing.left - outer.left + (at / svg.viewBox.baseVal.width) * drawing.width;
    const room = outer.width - box.offsetWidth - 4;
    box.style.left = `${Math.max(4, Math.min(x > outer.width / 2 ? x - box.offsetWidth - 10 : x + 10, room))}px`;
    box.style.top = `${drawing.top - outer.top + 24}px`;
  }

  function hide() {
    chosen = -1;
    box.hidden = true;
    rule.style.display = "none";
  }

  function line(text, color) {
    const row = document.createElement("div");
    if (color) row.append(Object.assign(document.createElement("i"), { style: `background:${color}` }));
    row.append(text);
    return row;
  }

  function follow(event) {
    if (!points.length) return;
    const drawing = svg.getBoundingClientRect();
    const at = ((event.clientX - drawing.left) / drawing.width) * svg.viewBox.baseVal.width;
    let nearest = 0;
    points.forEach((point, i) => {
      if (Math.abs(place(scales.x, point.x) - at) < Math.abs(place(scales.x, points[nearest].x) - at)) nearest = i;
    });
    show(nearest);
  }

  svg.addEventListener("pointermove", follow);
  svg.addEventListener("pointerdown", follow);
  svg.addEventListener("pointerleave", hide);
  svg.addEventListener("blur", hide);
  svg.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (event.key === "Escape") hide();
    if (!step || !points.length) return;
    event.preventDefault();
    show(Math.max(0, Math.min(points.length - 1, chosen < 0 ? (step > 0 ? 0 : points.length - 1) : chosen + step)));
  });
}

for (const stepper of document.querySelectorAll(".stepper")) {
  const steps = JSON.parse(stepper.dataset.steps);
  const part = stepper.closest("section");
  const input = stepper.querySelector("input");
  const figures = [...part.querySelectorAll("svg[data-moving], svg[data-cells]")].map((svg) => {
    const link = svg.closest("figure").querySelector('a[download$=".svg"]');
    const file = new DOMParser().parseFromString(textOf(link.href), "image/svg+xml");
    const name = link.download.replace(/\.svg$/, "");
    const cells = svg.dataset.cells?.split(";").map((frame) => frame.split(",").map((cell) => cell.split(" ")));
    const lines = svg.dataset.moving && JSON.parse(svg.dataset.moving);
    const scales = lines && JSON.parse(svg.dataset.scales);
    const heading = file.querySelector("title").textContent;
    return { svg, link, file, heading, name, cells, lines, scales };
  });

  function move() {
    const index = Number(input.value);
    stepper.querySelector("output").value = input.ariaValueText = steps[index].toLocaleString("en");
    for (const { svg, link, file, heading, name, cells, lines, scales } of figures) {
      for (const root of [svg, file.documentElement]) {
        if (cells) colorCells(root, cells[index]);
        else drawLines(root, lines, index, scales);
      }
      // The file that a reader downloads shows the step that the reader sees, and is named after it.
      for (const head of ["title", "text"]) file.querySelector(head).textContent = `${heading}, step ${steps[index]}`;
      link.href = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(new XMLSerializer().serializeToString(file))}`;
      link.download = `${name}-step-${steps[index]}.svg`;
      link.title = `Download ${link.download}`;
      // What could not be drawn was counted for the last step.
      for (const gap of svg.closest("figure").querySelectorAll(".gap")) gap.hidden = index < steps.length - 1;
      svg.dispatchEvent(new CustomEvent("step", { detail: index }));
    }
  }

  input.value = steps.length - 1; // a browser that reloads the page would keep the old place
  input.addEventListener("input", move);
  stepper.hidden = false;
  for (const text of part.querySelectorAll(".needs-script")) text.hidden = false;
}

function colorCells(root, cells) {
  root.querySelectorAll("g.cell").forEach((cell, i) => {
    const [kind, text] = cells[i];
    cell.setAttribute("class", `cell ${kind}`);
    cell.querySelector("text").textContent = text;
    const title = cell.querySelector("title");
    title.textContent = `${title.textContent.split(": ")[0]}: ${text}`;
  });
}

function drawLines(root, { x: xs, frames, marks }, index, scales) {
  root.querySelectorAll("path.line").forEach((path, i) => {
    const group = path.parentNode;
    const pieces = [[]];
    frames[index][i].forEach((value, k) => {
      if (typeof value === "number") pieces.at(-1).push([place(scales.x, xs[k]), place(scales.y, value)]);
      else if (value !== null) pieces.push([]); // NaN; null was never measured, and the line passes over it
    });
    const written = pieces.filter((piece) => piece.length);
    path.setAttribute("d", written.map((piece) => "M" + piece.map((point) => point.map(tenth)).join("L")).join(""));
    const color = path.getAttribute("style").match(/stroke:([^;]+)/)[1];
    const dots = written.filter((piece) => marks || piece.length === 1).flat();
    group.replaceChildren(path, ...dots.map(([x, y]) => {
      const dot = root.ownerDocument.createElementNS(SVG, "circle");
      for (const [key, value] of Object.entries({ cx: tenth(x), cy: tenth(y), r: 3, style: `fill:${color}` })) {
        dot.setAttribute(key, value);
      }
      return dot;
    }));
  });
}

function place(scale, value) {
  const unit = (v) => (scale.log ? Math.log10(v) : v);
  const [low, high] = scale.values.map(unit);
  const [start, end] = scale.pixels;
  return start + ((unit(value) - low) / (high - low)) * (end - start);
}

function tenth(value) {
  return Math.round(value * 10) / 10;
}

function format(value) {
  if (!Number.isFinite(value)) return Number.isNaN(value) ? "NaN" : value > 0 ? "∞" : "−∞";
  const size = Math.abs(value);
  const text = value !== 0 && (size < 1e-3 || size >= 1e6) ? value.toExponential(2) : String(Number(value.toPrecision(4)));
  return text.replace("-", "−");
}

function textOf(href) {
  const bytes = Uint8Array.from(atob(href.split(",")[1]), (character) => character.charCodeAt(0));
  return new TextDecoder().decode(bytes);
}

function parseCsv(href) {
  const text = textOf(href);
  const rows = [[]];
  const cell = /("(?:[^"]|"")*"|[^,\n]*)([,\n])/y;
  while (cell.lastIndex < text.length) {
    const [, value, end] = cell.exec(text);
    rows.at(-1).push(value.startsWith('"') ? value.slice(1, -1).replaceAll('""', '"') : value);
    if (end === "\n" && cell.lastIndex < text.length) rows.push([]);
  }
  return rows;
}
