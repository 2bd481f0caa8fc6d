// Draws a view with plotly: zoom by dragging, reset by a double click, values under the pointer.
function draw(place, view) {
  const plain = (text) => text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  const traces = view.lines.map((line) => ({
    x: line.x, y: line.y, name: plain(line.name), mode: line.dots ? "lines+markers" : "lines", marker: { color: line.colour, size: 5 },
    line: { color: line.colour, width: view.stacked ? 0.5 : 1.6 }, ...(view.stacked ? { stackgroup: "parts" } : {}),
    ...(line.faint ? { opacity: 0.25, hoverinfo: "skip" } : {}),
  }));
  const finite = view.lines.some((line) => line.y.some((value) => value !== null));
  const layout = {
    margin: { l: 56, r: 16, t: 12, b: 40 }, showlegend: false, hovermode: "x unified",
    xaxis: { visible: finite, title: { text: view.xTitle, standoff: 6 }, zeroline: false, nticks: 7, tickangle: 0, automargin: true, exponentformat: "none", tickformat: "~r", rangemode: view.xTitle === "step" ? "normal" : "tozero" },
    yaxis: { visible: finite, type: view.logarithmic ? "log" : "linear", zeroline: false, nticks: 7, automargin: true, exponentformat: "power", minexponent: 6, rangemode: view.stacked ? "tozero" : "normal" },
    shapes: view.marks.map((mark) => ({ type: "line", x0: mark.x, x1: mark.x, yref: "paper", y0: 0, y1: 1, line: { color: mark.colour, width: 1, dash: "dot" } })),
    annotations: finite ? [] : [{ text: "no finite value", showarrow: false, xref: "paper", yref: "paper", x: 0.5, y: 0.5 }],
  };
  Plotly.react(place, traces, layout, { displaylogo: false, displayModeBar: false, responsive: true });
}
