// Draws the panels, filtered by preset and precision, and copies commands.
let figures; // the id of a panel -> its figure
const filters = { preset: document.getElementById("preset"), precision: document.getElementById("precision") };
const style = getComputedStyle(document.documentElement);
const [ink, quiet, grid] = ["--ink", "--quiet", "--grid"].map((name) => style.getPropertyValue(name).trim());
const hover = document.getElementById("hover");
const touch = matchMedia("(pointer: coarse)").matches;
const FEW_BARS = 12;

// Returns whether the filters show an object with these settings. A filter ignores a setting that is "".
function isShown(settings) {
  return Object.entries(filters).every(([key, { value }]) => !value || !settings[key] || settings[key] === value);
}

// Returns the trace with the points that the filters show, or null if they show none. A point's origin is
// [lines of text, command, preset, precision].
function filterTrace(trace) {
  const isOriginShown = ([, , preset, precision]) => isShown({ preset, precision });
  if (trace.meta) return isOriginShown(trace.meta) ? trace : null;
  return trace.customdata ? keep(trace, trace.customdata.map(isOriginShown)) : trace;
}

// Returns the trace with only the points whose flag is true, or null if none is. It filters each array as long as flags.
function keep(trace, flags) {
  const filter = (value) => {
    if (Array.isArray(value)) return value.length === flags.length ? value.filter((_, i) => flags[i]) : value;
    if (!value || typeof value !== "object") return value;
    return Object.fromEntries(Object.entries(value).map(([key, item]) => [key, filter(item)]));
  };
  return flags.some(Boolean) ? filter(trace) : null;
}

// Returns the traces with only their first categories, and shows the button for all. Eighty bars are 4,000 pixels high.
function shorten(section, traces, order) {
  const present = new Set(traces.flatMap((trace) => trace.y)), button = section.querySelector(".all");
  const categories = order.filter((category) => present.has(category));
  button.hidden = categories.length <= FEW_BARS;
  if (button.hidden) return traces;
  button.textContent = section.dataset.all ? `Show the first ${FEW_BARS}` : `Show all ${categories.length}`;
  if (section.dataset.all) return traces;
  const shown = new Set(categories.slice(0, FEW_BARS));
  return traces.map((trace) => keep(trace, trace.y.map((category) => shown.has(category)))).filter(Boolean);
}

// The marks of a legend: Plotly's names of symbols and of dashes -> characters.
const MARKS = {
  circle: "●", square: "■", diamond: "◆", cross: "✚", "triangle-up": "▲", "triangle-down": "▼", x: "✖", star: "★",
  pentagon: "⬟", hexagon: "⬢", "diamond-tall": "♦", "triangle-left": "◀", "triangle-right": "▶", hexagram: "✶",
  solid: "━", dot: "•••", longdash: "━ ━", dash: "╍╍",
};

// Returns a legend that has each name once; a single name needs no legend. Plotly's own legend cuts long names on a phone.
function legend(traces) {
  const named = new Map(traces.filter((trace) => trace.name && trace.showlegend !== false).map((trace) => [trace.name, trace]));
  if (named.size < 2) return [];
  return [...named].map(([name, trace]) => {
    const label = document.createElement("span"), mark = label.appendChild(document.createElement("i"));
    mark.ariaHidden = "true";
    const { line, marker } = trace;
    mark.style.color = line?.color || (Array.isArray(marker.color) ? ink : marker.color);
    const shape = String(marker ? marker.symbol : line.dash);
    mark.textContent = shape.endsWith("open") ? "○" : MARKS[shape] || MARKS.circle;
    label.insertAdjacentHTML("beforeend", name); // escaped in Python, for Plotly
    return label;
  });
}

function plotLayout(figure, traces, width) {
  const categories = new Set(traces.flatMap((trace) => trace.y)), narrow = width < 480;
  const layout = structuredClone(figure.layout);
  for (const key of Object.keys(layout).filter((key) => /axis/.test(key))) {
    layout[key] = { gridcolor: grid, zerolinecolor: grid, automargin: true, fixedrange: touch, ...layout[key] };
    layout[key].title = { ...layout[key].title, font: { size: 12, color: quiet }, standoff: 8 };
  }
  if (figure.row) {
    const ticks = { ticks: "outside", ticklen: 6, tickcolor: "rgba(0,0,0,0)", tickfont: { size: narrow ? 11 : 12 } };
    const categoryarray = layout.yaxis.categoryarray.filter((category) => categories.has(category)); // others leave gaps
    Object.assign(layout.yaxis, { showgrid: false, categoryarray, ...ticks });
    if (narrow) for (const key of ["tickvals", "ticktext"]) layout.xaxis[key] = layout.xaxis[key]?.filter((_, i) => i % 2 === 0);
  }
  return {
    ...layout,
    height: figure.row ? figure.row * categories.size + 60 : 360,
    margin: { l: 8, r: 14, t: 8, b: 44 },
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { color: ink, size: 12, family: getComputedStyle(document.body).fontFamily },
    showlegend: false, hovermode: "closest", bargap: 0.28, dragmode: touch ? false : "zoom",
  };
}

function drawPanel(name, figure) {
  const section = document.getElementById(name), plot = section.querySelector(".plot");
  let traces = figure.data.map(filterTrace).filter(Boolean);
  const empty = !traces.some((trace) => trace.meta || trace.customdata);
  section.classList.toggle("empty", empty);
  if (empty) return;
  if (figure.row) traces = shorten(section, traces, figure.layout.yaxis.categoryarray);
  for (const trace of traces) // a phone shows no interval
    if (trace.text && plot.clientWidth < 480) trace.text = trace.text.map((text) => text.replace(/ \(.*\)/, ""));
  section.querySelector(".legend").replaceChildren(...legend(traces));
  Plotly.react(plot, traces, plotLayout(figure, traces, plot.clientWidth), { displayModeBar: false, responsive: true });
  if (plot.dataset.listens) return;
  plot.dataset.listens = "yes";
  plot.on("plotly_click", ({ points: [point] }) => copy((point.customdata || point.data.meta)?.[1]));
  plot.on("plotly_hover", ({ points: [point] }) => showHover(plot, point));
  plot.on("plotly_unhover", () => hover.classList.remove("on"));
}

// Shows the text of a point in a box beside it, inside the panel's card: the neighbouring panels stay visible. The box is
// right or left of the point if there is room, else below or above. Left of the end of a bar, it would hide the bar.
function showHover(plot, point) {
  const [text, command] = point.customdata || point.data.meta, { bbox, data } = point;
  const [title, ...lines] = text.split("\n");
  if (data.meta) lines.unshift(`${number(point.x)}: ${number(point.y)}`);
  const parts = [["b", title], ...lines.map((line) => ["p", line]), ["code", command]];
  hover.replaceChildren(...parts.map(([tag, text]) => element(tag, text)));
  const gap = 10, card = plot.closest(".card").getBoundingClientRect(), height = document.documentElement.clientHeight;
  hover.style.maxWidth = `${Math.min(440, card.width)}px`;
  const area = plot.getBoundingClientRect(), box = hover.getBoundingClientRect();
  const x = area.left - plot.offsetLeft, y = area.top - plot.offsetTop; // Plotly counts from the offset parent
  const mark = { left: x + bbox.x0, right: x + bbox.x1, top: y + bbox.y0, bottom: y + bbox.y1 };
  const clamp = (value, low, high) => Math.max(low, Math.min(value, high));
  let left = mark.right + gap, top = clamp((mark.top + mark.bottom - box.height) / 2, gap, height - box.height - gap);
  if (left + box.width > card.right && data.type !== "bar") left = mark.left - gap - box.width;
  if (left < card.left || left + box.width > card.right) {
    left = clamp((mark.left + mark.right - box.width) / 2, card.left, card.right - box.width);
    top = mark.bottom + gap + box.height < height ? mark.bottom + gap : Math.max(gap, mark.top - box.height - gap);
  }
  hover.style.translate = `${left}px ${top}px`;
  hover.classList.add("on");
}

function element(tag, text) {
  return Object.assign(document.createElement(tag), { textContent: text });
}

function number(value) {
  return value.toLocaleString("en", { maximumSignificantDigits: Math.abs(value) < 1000 ? 4 : 21 });
}

// Writes "12 rows", or "3 of 12 rows" if the filters hide some.
function countRows(count) {
  const rows = [...count.closest("section").querySelectorAll("tr:not(:first-child)")];
  const shown = rows.filter((row) => !row.hidden).length;
  count.dataset.all ||= count.textContent;
  count.textContent = (shown < rows.length ? `${shown} of ` : "") + count.dataset.all;
}

function draw() {
  hover.classList.remove("on");
  for (const [name, figure] of Object.entries(figures)) drawPanel(name, figure);
  document.querySelectorAll("[data-preset]").forEach((row) => (row.hidden = !isShown(row.dataset)));
  document.querySelectorAll(".count").forEach(countRows);
}

async function copy(command) {
  if (!command) return;
  const toast = document.getElementById("toast");
  try {
    await navigator.clipboard.writeText(command);
    toast.textContent = "Copied: " + command;
  } catch {
    toast.textContent = command; // some browsers do not let a local file copy
  }
  toast.classList.add("on");
  setTimeout(() => toast.classList.remove("on"), 2500);
}

// Returns the text that an element holds as gzip in base64.
async function unpack(id) {
  const bytes = Uint8Array.from(atob(document.getElementById(id).textContent), (character) => character.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
}

async function start() {
  figures = JSON.parse(await unpack("data"));
  document.head.append(element("script", await unpack("plotly")));
  draw();
  document.querySelectorAll("select").forEach((select) => select.addEventListener("change", draw));
}

document.querySelectorAll("select").forEach((select) => {
  select.parentElement.hidden = select.options.length < 3; // "all" and one value
});
document.addEventListener("click", (event) => copy(event.target.dataset.command));
document.querySelectorAll(".all").forEach((button) =>
  button.addEventListener("click", () => {
    const { id, dataset } = button.parentElement;
    dataset.all = dataset.all ? "" : "yes";
    drawPanel(id, figures[id]);
  }),
);
start();
