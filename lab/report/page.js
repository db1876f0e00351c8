// Draws the panels, filtered by model and precision, and copies commands.
const figures = JSON.parse(document.getElementById("data").textContent);
const filters = { model: document.getElementById("model"), precision: document.getElementById("precision") };
const style = getComputedStyle(document.documentElement);
const [ink, quiet, card, grid] = ["--ink", "--quiet", "--card", "--grid"].map((name) => style.getPropertyValue(name).trim());
const touch = matchMedia("(pointer: coarse)").matches;

// Returns whether the filters show an object with these settings. A filter ignores a setting that is "".
function isShown(settings) {
  return Object.entries(filters).every(([key, { value }]) => !value || !settings[key] || settings[key] === value);
}

// Returns the trace with the points that the filters show, or null if they show none. It filters every array whose
// length is the number of points. A point's origin is [hover text, command, model, precision].
function filterTrace(trace) {
  const isOriginShown = ([, , model, precision]) => isShown({ model, precision });
  if (trace.meta) return isOriginShown(trace.meta) ? trace : null;
  if (!trace.customdata) return trace;
  const flags = trace.customdata.map(isOriginShown);
  const filter = (value) => {
    if (Array.isArray(value)) return value.length === flags.length ? value.filter((_, i) => flags[i]) : value;
    if (!value || typeof value !== "object") return value;
    return Object.fromEntries(Object.entries(value).map(([key, item]) => [key, filter(item)]));
  };
  return flags.some(Boolean) ? filter(trace) : null;
}

// The marks of a legend: Plotly's names of symbols and of dashes -> characters.
const MARKS = {
  circle: "●", square: "■", diamond: "◆", cross: "✚", "triangle-up": "▲", "triangle-down": "▼", x: "✖", star: "★",
  pentagon: "⬟", hexagon: "⬢", solid: "━", dot: "•••", longdash: "━ ━", dash: "╍╍",
};

// Returns a legend that has each name once; a single name needs no legend. Plotly's own legend cuts long names on a phone.
function legend(traces) {
  const named = new Map(traces.filter((trace) => trace.name && trace.showlegend !== false).map((trace) => [trace.name, trace]));
  if (named.size < 2) return [];
  return [...named].map(([name, trace]) => {
    const label = document.createElement("span"), mark = label.appendChild(document.createElement("i"));
    const { line, marker } = trace;
    mark.style.color = line?.color || (Array.isArray(marker.color) ? ink : marker.color);
    const shape = String(marker ? marker.symbol : line.dash);
    mark.textContent = shape.endsWith("open") ? "○" : MARKS[shape] || MARKS.circle;
    label.insertAdjacentHTML("beforeend", name); // escaped in Python, for Plotly
    return label;
  });
}

function plotLayout(figure, traces, width) {
  const categories = new Set(traces.flatMap((trace) => trace.y)).size, narrow = width < 480;
  const layout = structuredClone(figure.layout);
  for (const key of Object.keys(layout).filter((key) => /axis/.test(key))) {
    layout[key] = { gridcolor: grid, zerolinecolor: grid, automargin: true, fixedrange: touch, ...layout[key] };
    layout[key].title = { ...layout[key].title, font: { size: 12, color: quiet }, standoff: 8 };
  }
  if (figure.row) {
    const ticks = { ticks: "outside", ticklen: 6, tickcolor: "rgba(0,0,0,0)", tickfont: { size: narrow ? 11 : 12 } };
    Object.assign(layout.yaxis, { showgrid: false, ...ticks });
    if (narrow) for (const key of ["tickvals", "ticktext"]) layout.xaxis[key] = layout.xaxis[key]?.filter((_, i) => i % 2 === 0);
  }
  return {
    ...layout,
    height: figure.row ? figure.row * categories + 60 : 360,
    margin: { l: 8, r: 14, t: 8, b: 44 },
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { color: ink, size: 12, family: getComputedStyle(document.body).fontFamily },
    hoverlabel: { bgcolor: card, bordercolor: quiet, align: "left", font: { color: ink, size: 12 } },
    showlegend: false, hovermode: "closest", bargap: 0.28, dragmode: touch ? false : "zoom",
  };
}

function drawPanel(name, figure) {
  const section = document.getElementById(name), plot = section.querySelector(".plot");
  const traces = figure.data.map(filterTrace).filter(Boolean);
  const empty = !traces.some((trace) => trace.meta || trace.customdata);
  section.classList.toggle("empty", empty);
  if (empty) return;
  for (const trace of traces) // a phone shows no interval
    if (trace.text && plot.clientWidth < 480) trace.text = trace.text.map((text) => text.replace(/ \(.*\)/, ""));
  section.querySelector(".legend").replaceChildren(...legend(traces));
  Plotly.react(plot, traces, plotLayout(figure, traces, plot.clientWidth), { displayModeBar: false, responsive: true });
  if (!plot.dataset.clicks) plot.on("plotly_click", ({ points: [point] }) => copy((point.customdata || point.data.meta)?.[1]));
  plot.dataset.clicks = "yes";
}

function draw() {
  for (const [name, figure] of Object.entries(figures)) drawPanel(name, figure);
  document.querySelectorAll("tr[data-model]").forEach((row) => (row.hidden = !isShown(row.dataset)));
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
draw();
