// Two conveniences; the page is complete without them: pictures that save on a click, and values read off a chart.
"use strict";

for (const link of document.querySelectorAll(".picture a")) link.href = link.querySelector("img").src;

for (const figure of document.querySelectorAll("figure.chart")) {
  const svg = figure.querySelector("svg");
  const scales = JSON.parse(svg.dataset.scales);
  const colors = [...svg.querySelectorAll("path.line")].map((path) => path.style.stroke);
  const [header, ...rows] = parseCsv(figure.querySelector('a[download$=".csv"]').href);
  const points = rows
    .map((row) => ({ x: Number(row[0]), cells: row.slice(1) }))
    .filter((point) => Number.isFinite(point.x) && (point.x > 0 || !scales.x.log));
  const box = document.createElement("div");
  box.className = "reading";
  box.hidden = true;
  figure.append(box);
  const rule = document.createElementNS("http://www.w3.org/2000/svg", "line");
  rule.setAttribute("class", "rule");
  rule.setAttribute("y1", scales.y.pixels[0]);
  rule.setAttribute("y2", scales.y.pixels[1]);
  rule.style.display = "none";
  svg.prepend(rule);
  let chosen = -1;

  function place(value) {
    const unit = (v) => (scales.x.log ? Math.log10(v) : v);
    const [low, high] = scales.x.values.map(unit);
    const [start, end] = scales.x.pixels;
    return start + ((unit(value) - low) / (high - low)) * (end - start);
  }

  function show(index) {
    chosen = index;
    const point = points[index];
    const at = place(point.x);
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
      if (Math.abs(place(point.x) - at) < Math.abs(place(points[nearest].x) - at)) nearest = i;
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

function format(value) {
  if (!Number.isFinite(value)) return Number.isNaN(value) ? "NaN" : value > 0 ? "∞" : "−∞";
  const size = Math.abs(value);
  const text = value !== 0 && (size < 1e-3 || size >= 1e6) ? value.toExponential(2) : String(Number(value.toPrecision(4)));
  return text.replace("-", "−");
}

function parseCsv(href) {
  const bytes = Uint8Array.from(atob(href.split(",")[1]), (character) => character.charCodeAt(0));
  const text = new TextDecoder().decode(bytes);
  const rows = [[]];
  const cell = /("(?:[^"]|"")*"|[^,\n]*)([,\n])/y;
  while (cell.lastIndex < text.length) {
    const [, value, end] = cell.exec(text);
    rows.at(-1).push(value.startsWith('"') ? value.slice(1, -1).replaceAll('""', '"') : value);
    if (end === "\n" && cell.lastIndex < text.length) rows.push([]);
  }
  return rows;
}
