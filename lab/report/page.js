// Draws the panels in the page's colours, filtered by model and precision, and copies commands.
const { entries, panels } = JSON.parse(document.getElementById("data").textContent);
const model = document.getElementById("model"), precision = document.getElementById("precision");
const touch = matchMedia("(pointer: coarse)").matches;

// Returns whether the filters show this id. The filters never hide an id without an entry. Each filter ignores an entry
// that lacks its setting.
function isShown(id) {
  const entry = entries[id];
  if (!entry) return true;
  const { model: itsModel, precisions } = entry;
  const precisionFits = !precision.value || !precisions.length || precisions.includes(precision.value);
  return precisionFits && (!model.value || !itsModel || itsModel === model.value);
}

// Returns the trace with the points that the filters show, or null if they show none. It filters every array whose
// length is the number of points.
function filterTrace(trace) {
  if (trace.meta) return isShown(trace.meta[0]) ? trace : null;
  if (!trace.customdata) return trace;
  const flags = trace.customdata.map(([id]) => isShown(id));
  const filter = (value) => {
    if (Array.isArray(value)) return value.length === flags.length ? value.filter((_, i) => flags[i]) : value;
    if (!value || typeof value !== "object") return value;
    return Object.fromEntries(Object.entries(value).map(([key, item]) => [key, filter(item)]));
  };
  return flags.some(Boolean) ? filter(trace) : null;
}

// Replaces "var(--ink)" by its colour in the light or the dark page, because Plotly does not resolve CSS variables.
function resolveColours(value, style) {
  if (typeof value === "string") return value.startsWith("var(") ? style.getPropertyValue(value.slice(4, -1)).trim() : value;
  if (Array.isArray(value)) return value.map((item) => resolveColours(item, style));
  if (!value || typeof value !== "object") return value;
  return Object.fromEntries(Object.entries(value).map(([key, item]) => [key, resolveColours(item, style)]));
}

// The marks of a legend: Plotly's names of symbols and of dashes -> characters.
const MARKS = {
  circle: "●", square: "■", diamond: "◆", cross: "✚", "triangle-up": "▲", "triangle-down": "▼", x: "✖", star: "★",
  pentagon: "⬟", hexagon: "⬢", solid: "━", dot: "•••", longdash: "━ ━", dash: "╍╍",
};

function markOf({ line, marker }) {
  const name = marker ? marker.symbol : line.dash;
  return String(name).endsWith("open") ? "○" : MARKS[name] || MARKS.circle;
}

// Returns a legend that has each name once; a single name needs no legend. Plotly's own legend cuts long names on a phone.
function legend(traces) {
  const named = new Map(traces.filter((trace) => trace.name && trace.showlegend !== false).map((trace) => [trace.name, trace]));
  if (named.size < 2) return [];
  return [...named].map(([name, trace]) => {
    const label = document.createElement("span"), mark = label.appendChild(document.createElement("i"));
    const { line, marker } = trace;
    mark.style.color = line?.color || (Array.isArray(marker.color) ? "var(--ink)" : marker.color);
    mark.textContent = markOf(trace);
    label.insertAdjacentHTML("beforeend", name); // escaped in Python, for Plotly
    return label;
  });
}

function plotLayout(figure, traces, width) {
  const categories = new Set(traces.flatMap((trace) => trace.y)).size, narrow = width < 480;
  const layout = structuredClone(figure.layout);
  for (const key of Object.keys(layout).filter((key) => /axis/.test(key))) {
    layout[key] = { gridcolor: "var(--grid)", zerolinecolor: "var(--grid)", automargin: true, fixedrange: touch, ...layout[key] };
    layout[key].title = { ...layout[key].title, font: { size: 12, color: "var(--quiet)" }, standoff: 8 };
  }
  if (figure.row) {
    const ticks = { ticks: "outside", ticklen: 6, tickcolor: "rgba(0,0,0,0)", tickfont: { size: narrow ? 11 : 12 } };
    Object.assign(layout.yaxis, { showgrid: false, ...ticks });
    if (narrow) for (const key of ["tickvals", "ticktext"]) layout.xaxis[key] = layout.xaxis[key]?.filter((_, i) => i % 2 === 0);
  }
  return {
    ...layout,
    height: figure.row ? figure.row * categories + 60 : 360,
    margin: { l: 8, r: 14, t: 8, b: 44, ...layout.margin },
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { color: "var(--ink)", size: 12, family: getComputedStyle(document.body).fontFamily },
    hoverlabel: { bgcolor: "var(--card)", bordercolor: "var(--quiet)", align: "left", font: { color: "var(--ink)", size: 12 } },
    showlegend: false, hovermode: "closest", bargap: 0.28, dragmode: touch ? false : "zoom",
  };
}

// Fits the two lines of a bar's text: a long bar has them side by side, and a phone shows no interval.
function fitBarText(trace, wide) {
  const isLong = (i) => trace.x[i] > 0.8 * Math.max(...trace.x);
  const withoutInterval = (text) => text.replace(/ \(([^)]*)\)/, (_, inside) => (inside.includes("other GPU") ? ", other GPU" : ""));
  trace.text = trace.text.map((text, i) => {
    if (!wide) return withoutInterval(text);
    return isLong(i) ? text.replace("<br>", "  ") : text;
  });
}

// Returns the entry of a point, or undefined.
const entryOf = (customdata, meta) => entries[(customdata || meta)?.[0]];

function drawPanel(name, figure, style) {
  const card = document.getElementById(name), plot = card.querySelector(".plot");
  const traces = figure.data.map(filterTrace).filter(Boolean);
  const ids = traces.flatMap((trace) => (trace.meta ? [trace.meta] : trace.customdata || [])).map(([id]) => id);
  const empty = !ids.some((id) => typeof entries[id]?.command === "string");
  card.classList.toggle("empty", empty);
  if (empty) return;
  for (const trace of traces) if (trace.type === "bar" && trace.text) fitBarText(trace, plot.clientWidth > 480);
  card.querySelector(".legend").replaceChildren(...legend(traces));
  const layout = plotLayout(figure, traces, plot.clientWidth);
  Plotly.react(plot, resolveColours(traces, style), resolveColours(layout, style), { displayModeBar: false, responsive: true });
  if (!plot.dataset.clicks) plot.on("plotly_click", ({ points: [point] }) => copy(entryOf(point.customdata, point.data.meta)?.command));
  plot.dataset.clicks = "yes";
}

function draw() {
  const style = getComputedStyle(document.documentElement);
  for (const [name, figure] of Object.entries(panels)) drawPanel(name, figure, style);
  document.querySelectorAll("[data-id]").forEach((element) => (element.hidden = !isShown(element.dataset.id)));
  document.querySelectorAll(".tiles:not([hidden])").forEach((tiles, i) => (tiles.hidden = i > 0));
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

document.querySelectorAll("select").forEach((select) => {
  select.parentElement.hidden = select.options.length < 3; // "all" and one value
  select.addEventListener("change", draw);
});
document.addEventListener("click", (event) => copy(event.target.dataset.command));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
draw();
