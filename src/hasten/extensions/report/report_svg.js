// Draws a view as SVG: lines, axes, events, and values under the pointer.
function draw(place, view) {
  if (!place.dataset.drawn) {
    place.dataset.drawn = "1";
    new ResizeObserver(() => paint(place)).observe(place);
  }
  place.view = view;
  paint(place);
}

function shape(kind, attributes, text) {
  const made = document.createElementNS("http:\u002f/www.w3.org/2000/svg", kind);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

// Round positions on an axis, at most `most` of them.
function ticks(low, high, most) {
  const rough = (high - low) / most || 1, power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((factor) => factor * power >= rough * 0.999999);
  const made = [];
  for (let at = Math.ceil(low / step - 1e-9); at * step <= high + step * 1e-9; at++) made.push(at * step);
  return made;
}

function words(value) {
  const size = Math.abs(value);
  return size !== 0 && (size >= 1e6 || size < 1e-4) ? Number(value.toPrecision(4)).toExponential().replace("e+", "e") : String(Number(value.toPrecision(6)));
}

// The heights of the lines: as they are, or each on top of those before it.
function heights(view) {
  const sums = new Map();
  return view.lines.map((line) => line.y.map((value, at) => {
    if (value === null) return [null, null];
    if (!view.stacked) return view.logarithmic && value <= 0 ? [null, null] : [null, view.logarithmic ? Math.log10(value) : value];
    const below = sums.get(at) || 0;
    sums.set(at, below + value);
    return [below, below + value];
  }));
}

function range(values, flat) {
  let low = Infinity, high = -Infinity;
  for (const value of values) if (value !== null) { low = Math.min(low, value); high = Math.max(high, value); }
  if (low > high) return null;
  const room = high > low ? (high - low) * flat : Math.abs(high) * 0.1 || 1;
  return [low - room, high + room];
}

function paint(place) {
  const view = place.view, width = place.clientWidth, height = place.clientHeight;
  if (!width || !height) return;
  const svg = shape("svg", { viewBox: `0 0 ${width} ${height}`, class: "drawn" });
  place.replaceChildren(svg);
  const tall = heights(view);
  const across = range(view.lines.flatMap((line, number) => line.x.filter((_, at) => tall[number][at][1] !== null)), 0.02);
  const up = range(tall.flat(2).concat(view.stacked ? [0] : []), 0.05);
  if (!across || !up) {
    svg.append(shape("text", { x: width / 2, y: height / 2, "text-anchor": "middle" }, view.lines.length ? "no finite value" : ""));
    return;
  }
  if (view.stacked) up[0] = 0;
  if (view.xTitle !== "step") across[0] = 0;
  const levels = ticks(up[0], up[1], 5).filter((value) => !view.logarithmic || up[1] - up[0] < 1 || Number.isInteger(value));
  const labels = levels.map((value) => words(view.logarithmic ? 10 ** value : value));
  const left = 18 + 6.6 * Math.max(...labels.map((label) => label.length), 1), right = width - 16, top = 12, bottom = height - 40;
  const px = (x) => left + ((x - across[0]) / (across[1] - across[0])) * (right - left);
  const py = (y) => bottom - ((y - up[0]) / (up[1] - up[0])) * (bottom - top);
  levels.forEach((value, number) => {
    svg.append(shape("line", { x1: left, x2: right, y1: py(value), y2: py(value), stroke: "#e6ebef" }));
    svg.append(shape("text", { x: left - 6, y: py(value) + 4, "text-anchor": "end" }, labels[number]));
  });
  const whole = view.xTitle === "step";
  for (const value of ticks(across[0], across[1], Math.max((right - left) / 80, 2)).filter((value) => !whole || Number.isInteger(value))) {
    svg.append(shape("text", { x: px(value), y: bottom + 16, "text-anchor": "middle" }, words(value)));
  }
  svg.append(shape("text", { x: (left + right) / 2, y: height - 6, "text-anchor": "middle" }, view.xTitle));
  view.lines.forEach((line, number) => lineOf(svg, line, tall[number], px, py, view.stacked));
  for (const mark of view.marks) {
    if (mark.x < across[0] || mark.x > across[1]) continue;
    const drawn = shape("line", { x1: px(mark.x), x2: px(mark.x), y1: top, y2: bottom, stroke: mark.colour, "stroke-dasharray": "2 3" });
    drawn.append(shape("title", {}, mark.name));
    svg.append(drawn);
  }
  pointed(svg, view, px, left, right, top, bottom);
}

// The parts of a line without gaps.
function parts(values) {
  const made = [[]];
  values.forEach(([, value], at) => (value === null ? made.push([]) : made.at(-1).push(at)));
  return made.filter((part) => part.length);
}

function lineOf(svg, line, values, px, py, stacked) {
  const faint = line.faint ? 0.25 : 1;
  for (const part of parts(values)) {
    const above = part.map((at) => `${px(line.x[at]).toFixed(1)},${py(values[at][1]).toFixed(1)}`);
    if (stacked && part.length > 1) {
      const below = part.map((at) => `${px(line.x[at]).toFixed(1)},${py(values[at][0]).toFixed(1)}`).reverse();
      svg.append(shape("polygon", { points: [...above, ...below].join(" "), fill: line.colour, "fill-opacity": 0.6 }));
    } else if (part.length > 1) {
      svg.append(shape("polyline", { points: above.join(" "), fill: "none", stroke: line.colour, "stroke-width": 1.6, opacity: faint }));
    } else {
      const [x, y] = above[0].split(",");
      svg.append(shape("circle", { cx: x, cy: y, r: 3, fill: line.colour, opacity: faint }));
    }
  }
}

// Shows the values nearest to the pointer in x.
function pointed(svg, view, px, left, right, top, bottom) {
  const ruler = shape("line", { y1: top, y2: bottom, stroke: "#8a97a3", visibility: "hidden" });
  const said = shape("text", { y: top - 2, visibility: "hidden" });
  const area = shape("rect", { x: left, y: top, width: Math.max(right - left, 0), height: Math.max(bottom - top, 0), fill: "transparent" });
  area.addEventListener("pointermove", (event) => {
    const at = event.clientX - svg.getBoundingClientRect().left;
    const near = view.lines.filter((line) => !line.faint).map((line) => {
      let best = -1;
      line.x.forEach((x, number) => {
        if (line.y[number] !== null && (best < 0 || Math.abs(px(x) - at) < Math.abs(px(line.x[best]) - at))) best = number;
      });
      return [line, best];
    }).filter(([, best]) => best >= 0);
    if (!near.length) return;
    const x = near[0][0].x[near[0][1]];
    for (const [name, value] of Object.entries({ x1: px(x), x2: px(x), visibility: "visible" })) ruler.setAttribute(name, value);
    said.setAttribute("visibility", "visible");
    said.setAttribute("x", left);
    said.textContent = `${view.xTitle} ${words(x)}: ` + near.slice(0, 6).map(([line, best]) => words(line.y[best])).join("  ");
  });
  area.addEventListener("pointerleave", () => [ruler, said].forEach((made) => made.setAttribute("visibility", "hidden")));
  svg.append(ruler, said, area);
}
