// Draws the panels that panels.py and benches.py made, in the page's colours, filtered by model and precision.
const { subjects, panels } = JSON.parse(document.getElementById("data").textContent);
const model = document.getElementById("model"), precision = document.getElementById("precision");
const touch = matchMedia("(pointer: coarse)").matches;

function shown(id) {
  const it = subjects[id];
  if (!it) return true;
  const fits = !precision.value || !it.precisions.length || it.precisions.includes(precision.value);
  return fits && (!model.value || !it.model || it.model === model.value);
}

// The trace with the points that are shown: of each array with an entry a point, these entries. Null: none are.
function kept(trace) {
  if (trace.meta) return shown(trace.meta[0]) ? trace : null;
  if (!trace.customdata) return trace;
  const stay = trace.customdata.map(([id]) => shown(id)), n = stay.length;
  const fewer = (value) => {
    if (Array.isArray(value)) return value.length === n ? value.filter((_, i) => stay[i]) : value;
    if (value && typeof value === "object") return Object.fromEntries(Object.entries(value).map(([k, v]) => [k, fewer(v)]));
    return value;
  };
  return stay.some(Boolean) ? fewer(trace) : null;
}

// What panels.py calls var(--ink), as the colour that it is now.
function coloured(value, style) {
  if (typeof value === "string") return value.startsWith("var(") ? style.getPropertyValue(value.slice(4, -1)).trim() : value;
  if (Array.isArray(value)) return value.map((each) => coloured(each, style));
  if (value && typeof value === "object") return Object.fromEntries(Object.entries(value).map(([k, v]) => [k, coloured(v, style)]));
  return value;
}

// Plotly's own cuts long names on a phone. Each name stands once, and one alone says nothing.
function legend(traces) {
  const named = new Map(traces.filter((trace) => trace.name && trace.showlegend !== false).map((trace) => [trace.name, trace]));
  return [...named].slice(named.size > 1 ? 0 : 1).map(([name, { line, marker }]) => {
    const key = document.createElement("span"), mark = key.appendChild(document.createElement("i"));
    const colour = line?.color || (Array.isArray(marker.color) ? "var(--ink)" : marker.color);
    mark.style.color = colour;
    mark.className = line ? line.dash || "solid" : /open|thin/.test(marker.symbol) ? "open" : typeof marker.symbol === "string" ? marker.symbol : "";
    key.insertAdjacentHTML("beforeend", name);
    return key;
  });
}

function framed(figure, traces, width) {
  const lines = new Set(traces.flatMap((trace) => trace.y)).size, narrow = width < 480;
  const layout = structuredClone(figure.layout);
  for (const key of Object.keys(layout).filter((key) => /axis/.test(key))) {
    layout[key] = { gridcolor: "var(--grid)", zerolinecolor: "var(--grid)", automargin: true, fixedrange: touch, ...layout[key] };
    layout[key].title = { ...layout[key].title, font: { size: 12, color: "var(--quiet)" }, standoff: 8 };
  }
  if (figure.row && narrow) for (const key of ["tickvals", "ticktext"]) layout.xaxis[key] = layout.xaxis[key]?.filter((_, i) => i % 2 === 0);
  if (figure.row) Object.assign(layout.yaxis, { showgrid: false, ticks: "outside", ticklen: 6, tickcolor: "rgba(0,0,0,0)", tickfont: { size: narrow ? 11 : 12 } });
  return {
    ...layout,
    height: figure.row ? figure.row * lines + 60 : 360,
    margin: { l: 8, r: 14, t: 8, b: 44, ...layout.margin },
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { color: "var(--ink)", size: 12, family: getComputedStyle(document.body).fontFamily },
    hoverlabel: { bgcolor: "var(--card)", bordercolor: "var(--quiet)", align: "left", font: { color: "var(--ink)", size: 12 } },
    showlegend: false, hovermode: "closest", bargap: 0.28, dragmode: touch ? false : "zoom",
  };
}

function draw() {
  const style = getComputedStyle(document.documentElement);
  for (const [name, figure] of Object.entries(panels)) {
    const card = document.getElementById(name), plot = card.querySelector(".plot");
    const traces = figure.data.map(kept).filter(Boolean), wide = plot.clientWidth > 480;
    for (const bar of traces.filter((trace) => trace.type === "bar" && trace.text)) {
      const room = 0.8 * Math.max(...bar.x); // for both lines side by side; on a phone the interval is in the hover alone
      const short = (text) => text.replace(/ \(([^)]*)\)/, (_, told) => (told.includes("other GPU") ? ", other GPU" : ""));
      bar.text = bar.text.map((text, i) => (!wide ? short(text) : bar.x[i] > room ? text.replace("<br>", "  ") : text));
    }
    const own = traces.some((t) => (t.meta ? [t.meta] : t.customdata || []).some(([id]) => subjects[id]?.command));
    card.classList.toggle("empty", !own);
    if (!own) continue;
    card.querySelector(".legend").replaceChildren(...legend(traces));
    const layout = framed(figure, traces, plot.clientWidth);
    Plotly.react(plot, coloured(traces, style), coloured(layout, style), { displayModeBar: false, responsive: true });
    if (!plot.dataset.clicks) plot.on("plotly_click", ({ points: [point] }) => copy(subjects[(point.customdata || point.data.meta)?.[0]]?.command));
    plot.dataset.clicks = "yes";
  }
  document.querySelectorAll("[data-id]").forEach((each) => (each.hidden = !shown(each.dataset.id)));
  document.querySelectorAll(".hero:not([hidden])").forEach((hero, i) => (hero.hidden = i > 0));
}

async function copy(command) {
  if (!command) return;
  const toast = document.getElementById("toast");
  try {
    await navigator.clipboard.writeText(command);
    toast.textContent = "Copied: " + command;
  } catch {
    toast.textContent = command; // a page from a file may not copy in every browser
  }
  toast.classList.add("on");
  setTimeout(() => toast.classList.remove("on"), 2500);
}

document.querySelectorAll("select").forEach((select) => {
  select.parentElement.hidden = select.options.length < 3; // nothing to choose
  select.addEventListener("change", draw);
});
document.addEventListener("click", (event) => copy(event.target.dataset.command));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
draw();
