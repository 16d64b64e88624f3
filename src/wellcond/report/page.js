// Draws the page's charts with Vega, and moves them: lines that toggle, a block highlighted in all charts, sliders, zoom by
// buttons and keys; and takes them out: SVG, PNG, CSV, the clipboard, a card to share.
"use strict";

const night = matchMedia("(prefers-color-scheme: dark)");
const dark = JSON.parse(document.getElementById("dark").textContent);
const state = {}; // of the sliders and of the highlight: parameter -> value
const charts = [...document.querySelectorAll("figure.chart")].map((figure) => {
  const chart = JSON.parse(figure.querySelector("script").textContent);
  return { ...chart, rows: read(chart.csv, chart.parse), figure, off: [], params: new Set((chart.spec.params ?? []).map((param) => param.name)) };
});
const said = Object.assign(document.createElement("p"), { className: "said" });
said.setAttribute("role", "status");
document.body.append(said);

/** The rows of a CSV; Vega's own reader would compile a function, which the page's policy forbids. */
function read(text, parse) {
  const rows = [[]];
  const cell = /("(?:[^"]|"")*"|[^,\n]*)([,\n])/y;
  while (cell.lastIndex < text.length) {
    const [, value, end] = cell.exec(text);
    rows.at(-1).push(value.startsWith('"') ? value.slice(1, -1).replaceAll('""', '"') : value);
    if (end === "\n" && cell.lastIndex < text.length) rows.push([]);
  }
  const [header, ...lines] = rows;
  const typed = (key, value) => (parse[key] !== "number" ? value : value === "" ? null : Number(value));
  return lines.map((line) => Object.fromEntries(header.map((key, i) => [key, typed(key, line[i])])));
}

// ---- drawing

/** The specification with its rows, which come last: JSON has no NaN. */
function filled(chart, { atNight, legends, ...change }) {
  const look = (key, value) => {
    if (legends && key === "legend" && value === null) return { title: null };
    return (atNight && dark[value]) || value;
  };
  const spec = { ...JSON.parse(JSON.stringify(chart.spec), look), ...change };
  if (spec.data?.name === "rows") spec.data = { values: chart.rows.map((row) => ({ ...row })) };
  return spec;
}

async function draw(chart) {
  chart.result?.finalize();
  const place = chart.figure.querySelector(".vega");
  const spec = filled(chart, { atNight: night.matches, background: "transparent", padding: 2 });
  if (spec.width) spec.autosize = { type: "fit-x", contains: "padding" };
  const tooltip = { theme: night.matches ? "dark" : "light" };
  chart.result = await vegaEmbed(place, spec, { ast: true, actions: false, renderer: "svg", tooltip });
  const { view } = chart.result;
  for (const [name, value] of Object.entries({ ...state, off: chart.off })) set(chart, name, value);
  view.addEventListener("pointerover", (_, item) => point(blockOf(item)));
  view.addEventListener("pointerout", () => point(""));
}

function set(chart, name, value) {
  if (chart.result && chart.params.has(name)) chart.result.view.signal(name, value).runAsync();
}

function share(name, value) {
  state[name] = value;
  for (const chart of charts) set(chart, name, value);
}

// ---- a block, highlighted everywhere

const blockOf = (item) => (item?.datum?.datum ?? item?.datum)?.block ?? "";

function point(block) {
  if ((state.block ?? "") !== block) share("block", block);
}

for (const row of document.querySelectorAll("tr[data-block]")) {
  for (const event of ["pointerenter", "focus"]) row.addEventListener(event, () => point(row.dataset.block));
  for (const event of ["pointerleave", "blur"]) row.addEventListener(event, () => point(""));
}

// ---- legends and sliders

for (const button of document.querySelectorAll(".legend button")) {
  const scope = button.closest("figure") ?? button.closest(".multiples");
  button.addEventListener("click", () => {
    const on = button.ariaPressed !== "true";
    button.ariaPressed = on;
    const off = [...scope.querySelectorAll('.legend button[aria-pressed="false"]')].map((one) => one.dataset.line);
    for (const chart of charts.filter((one) => scope.contains(one.figure))) {
      chart.off = off;
      set(chart, "off", off);
    }
  });
}

const steppers = [...document.querySelectorAll(".stepper")];
const sliders = steppers.map((stepper) => stepper.dataset.signal);

for (const stepper of steppers) {
  const values = JSON.parse(stepper.dataset.values);
  const input = stepper.querySelector("input");
  const move = () => {
    const value = values[Number(input.value)];
    stepper.querySelector("output").value = input.ariaValueText = value.toLocaleString("en");
    share(stepper.dataset.signal, value);
    for (const one of document.querySelectorAll(`[data-${stepper.dataset.signal}]`)) {
      one.hidden = Number(one.dataset[stepper.dataset.signal]) !== value;
    }
  };
  input.value = input.getAttribute("value"); // a browser that reloads the page would keep the old place
  input.addEventListener("input", move);
  stepper.hidden = false;
  move();
}
for (const part of document.querySelectorAll(".needs-script")) part.hidden = false;
document.getElementById("without-script").remove();

// ---- zoom, by buttons and keys; dragging and the wheel are Vega's own

function zoom(chart, factor, shift = 0) {
  const { view } = chart.result;
  chart.zoom.forEach(({ field, log }, i) => {
    const [low, high] = view.scale("xy"[i]).domain().map((end) => (log ? Math.log(end) : end));
    const [middle, half] = [(low + high) / 2 + (i ? 0 : shift * (high - low)), ((high - low) / 2) * factor];
    const ends = [middle - half, middle + half].map((end) => (log ? Math.exp(end) : end));
    view.signal(`zoom_${field}`, factor ? ends : null);
  });
  view.runAsync();
}

const KEYS = { "+": [0.7], "=": [0.7], "-": [1 / 0.7], 0: [0], ArrowLeft: [1, -0.2], ArrowRight: [1, 0.2] };

// ---- taking charts out

/** The chart as it is seen, in light colours, with its title and its legend, on a view of its own; or as a card. */
async function picture(chart, card) {
  const moved = sliders.filter((name) => chart.params.has(name)).map((name) => `, ${name} ${state[name]}`);
  const { title, lead, width } = card ?? { title: titleOf(chart) + moved.join(""), lead: "", width: 720 };
  const spec = filled(chart, { legends: true, background: "white", padding: 16 });
  const size = width > 1000 ? 30 : 15;
  const lines = lead ? wrapped(lead, 100) : [];
  const head = { text: wrapped(title, width / size / 0.56), subtitle: lines, anchor: "start", fontSize: size };
  if (!spec.title) spec.title = { ...head, subtitleFontSize: 0.65 * size, offset: 16 };
  if (spec.width) Object.assign(spec, { width, autosize: { type: "pad" } });
  const place = document.createElement("div");
  const { view } = await vegaEmbed(place, spec, { ast: true, actions: false, renderer: "svg" });
  const names = ["off", ...sliders].filter((name) => chart.params.has(name));
  names.push(...chart.zoom.map(({ field }) => `zoom_${field}`));
  if (card) return view; // which has the page's title: that is about the state at first
  for (const name of names) {
    const value = chart.result.view.signal(name);
    if (value != null) view.signal(name, value);
  }
  return view.runAsync();
}

const titleOf = (chart) => chart.figure.querySelector("h3").firstChild.data;

function wrapped(text, width) {
  const lines = [""];
  for (const word of text.split(/\s+/)) {
    if (lines.at(-1) && `${lines.at(-1)} ${word}`.length > width) lines.push("");
    lines[lines.length - 1] = `${lines.at(-1)} ${word}`.trim();
  }
  return lines;
}

function save(name, content, kind) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(content instanceof Blob ? content : new Blob([content], { type: kind }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  say(`Saved ${name}.`);
}

const png = async (view, scale = 2) => new Promise(async (done) => (await view.toCanvas(scale)).toBlob(done, "image/png"));

/** Into the clipboard, or into a file where the browser does not allow that. */
async function copy(name, blob) {
  try {
    await navigator.clipboard.write([new ClipboardItem({ "image/png": blob })]);
    say("Copied as a picture.");
  } catch {
    save(name, await blob);
  }
}

function nameOf(chart, ending) {
  const moved = sliders.filter((name) => chart.params.has(name)).map((name) => `-${name}-${state[name]}`);
  return `${chart.figure.id}${ending === "csv" ? "" : moved.join("")}.${ending}`;
}

function say(text) {
  said.textContent = text;
  setTimeout(() => said.textContent === text && (said.textContent = ""), 4000);
}

function tool(label, title, act) {
  const button = Object.assign(document.createElement("button"), { type: "button", textContent: label, title });
  button.ariaLabel = title;
  button.addEventListener("click", act);
  return button;
}

for (const chart of charts) {
  const tools = Object.assign(document.createElement("span"), { className: "tools" });
  if (chart.zoom.length) {
    tools.append(
      tool("+", "Zoom in (drag moves, Ctrl and the wheel zoom)", () => zoom(chart, 0.7)),
      tool("−", "Zoom out", () => zoom(chart, 1 / 0.7)),
      tool("↺", "Show all", () => zoom(chart, 0)),
    );
    const drawing = chart.figure.querySelector(".drawing");
    Object.assign(drawing, { tabIndex: 0, role: "group", ariaLabel: `${titleOf(chart)}: plus and minus zoom, arrows move, 0 shows all` });
    drawing.addEventListener("keydown", (event) => {
      if (!KEYS[event.key] || event.ctrlKey || event.metaKey) return;
      event.preventDefault();
      zoom(chart, ...KEYS[event.key]);
    });
  }
  tools.append(
    tool("SVG", "Save as SVG", async () => save(nameOf(chart, "svg"), await (await picture(chart)).toSVG(), "image/svg+xml")),
    tool("PNG", "Save as PNG", async () => save(nameOf(chart, "png"), await png(await picture(chart)))),
    tool("CSV", "Save the numbers as CSV", () => save(nameOf(chart, "csv"), chart.csv, "text/csv")),
    tool("Copy", "Copy as a picture", () => copy(nameOf(chart, "png"), picture(chart).then(png))),
  );
  chart.figure.querySelector(".foot").append(tools);
}

if (charts.length) {
  const about = { title: document.querySelector("h1").textContent, width: 1100 };
  about.lead = document.querySelector(".lead")?.textContent ?? "";
  const shown = charts.find((chart) => chart.figure.id === document.body.dataset.card) ?? charts[0];
  const card = () => copy("card.png", picture(shown, about).then((view) => png(view, 1)));
  document.querySelector("header").prepend(tool("Copy as a card", "Copy title and main chart as a picture to share", card));
}

// ---- numbers, for those who cannot see a chart or want to read it off

const ROWS_MOST = 500;

for (const chart of charts) {
  const details = chart.figure.querySelector(".numbers");
  details.addEventListener("toggle", () => {
    if (!details.open) return;
    const header = Object.keys(chart.parse);
    const moved = sliders.filter((name) => chart.params.has(name));
    const rows = chart.rows.filter((row) => moved.every((name) => row[name] === null || row[name] === state[name]));
    const line = (cells, name) => {
      const row = document.createElement("tr");
      row.append(...cells.map((cell) => Object.assign(document.createElement(name), { textContent: cell })));
      return row;
    };
    const text = (value) => (typeof value === "number" ? String(Number(value.toPrecision(6))) : value ?? "");
    const table = document.createElement("table");
    table.append(line(header, "th"));
    table.append(...rows.slice(0, ROWS_MOST).map((row) => line(header.map((key) => text(row[key])), "td")));
    const scroll = Object.assign(document.createElement("div"), { className: "scroll", tabIndex: 0 });
    scroll.append(table);
    details.replaceChildren(details.querySelector("summary"), scroll);
    if (rows.length > ROWS_MOST) details.append(`The first ${ROWS_MOST} of ${rows.length} rows; the CSV has all.`);
  });
}

// ---- one after the other, from the top, so that a reader sees the first at once

async function drawAll() {
  for (const chart of charts) {
    await draw(chart);
    await new Promise((next) => setTimeout(next));
  }
  document.documentElement.dataset.drawn = night.matches ? "dark" : "light";
}

night.addEventListener("change", drawAll);
drawAll();
