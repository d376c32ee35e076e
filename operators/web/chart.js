// Plots without a library: drawn at the width they have, readable with a pointer, by keyboard and as a table.
import {count, h, span, when} from "./dom.js";

const COLOURS = 8, DASHES = [null, "7 4", "2 3"]; // colours that differ in every kind of colour vision; then other lines
export const look = i => ({colour: `var(--s${i % COLOURS})`, dash: DASHES[Math.floor(i / COLOURS) % DASHES.length]});
/** A background that shows the colour and the dashes of a line. */
export const swatch = ({colour, dash}) => dash ? `repeating-linear-gradient(90deg, ${colour} 0 3px, transparent 3px 5px)` : colour;
const day = 86_400_000;

function clock(ms, range) {
  const text = new Date(ms).toISOString();
  return range > 20 * day ? text.slice(0, 10) : range > day / 2 ? text.slice(5, 16).replace("T", " ") : range > 600_000 ? text.slice(11, 16) : text.slice(11, 19);
}
export const instants = (low, high) => ms => clock(ms, high - low);

function ticks(low, high, wanted) {
  const raw = (high - low) / wanted || 1, unit = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].find(m => m * unit >= raw) * unit;
  const found = [];
  for (let v = Math.ceil(low / step - 1e-9) * step; v <= high + step * 1e-6; v += step) found.push(v + 0);
  return found;
}
const TIMES = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 432000, 864000, 2592000, 7776000].map(s => s * 1000);
function timeTicks(low, high, wanted) {
  const step = TIMES.find(t => (high - low) / t <= wanted) || 31_536_000_000;
  const found = [];
  for (let v = Math.ceil(low / step) * step; v <= high; v += step) found.push(v);
  return found;
}

const L = 62, LONG = 84, T = 10, B = 24; // margins; LONG for instants

/** Anything that is drawn again when it gets other data or another width. */
function canvas(className, draw) {
  const node = h("div", {class: className});
  let width = 0;
  const again = () => { if (width) draw(node, width); };
  new ResizeObserver(() => { if (node.clientWidth && node.clientWidth !== width) { width = node.clientWidth; again(); } }).observe(node);
  return {node, again};
}

/** Lines over time. `series`: {name, colour, value(point), wide}; `unit(value)` names a value; `held(point)` colours a strip below. */
export function lines(label, {height = 200, zero = false, time = false, duration = false, unit = count, held = null, windows = false} = {}) {
  let points = [], series = [], at = null;
  const readout = h("div", {class: time ? "readout long num" : "readout num", "aria-live": "off"});
  const {node: plot, again} = canvas("plot", draw);
  const numbers = h("details", {class: "numbers", toggle: () => list()}, h("summary", {}, "As a table"), h("div", {class: "scroll", tabindex: 0}));
  const node = h("div", {class: "chart"}, plot, readout, numbers);
  plot.addEventListener("pointerleave", () => { at = null; pointer(); });
  plot.addEventListener("pointermove", event => { at = nearest(event.clientX - plot.getBoundingClientRect().left); pointer(); });
  plot.addEventListener("keydown", event => {
    const step = {ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10}[event.key];
    if (event.key === "Home") at = 0;
    else if (event.key === "End") at = points.length - 1;
    else if (step) at = Math.min(points.length - 1, Math.max(0, (at ?? points.length) + step));
    else return;
    event.preventDefault();
    readout.setAttribute("aria-live", "polite");
    pointer();
  });
  let x = null, cross = null, dots = null;

  function nearest(px) {
    let best = null;
    points.forEach((p, i) => { if (x && (best === null || Math.abs(x(p.at) - px) < Math.abs(x(points[best].at) - px))) best = i; });
    return best;
  }
  function draw(box, W) {
    const named = series.length > 1 && W > 380, R = named ? Math.min(120, 16 + 7 * Math.max(...series.map(s => s.name.length))) : 14;
    const L = time ? LONG : 62, H = height, strip = held ? 12 : 0, floor = H - B - strip;
    const values = series.flatMap(s => points.map(s.value)).filter(v => v !== null && v !== undefined);
    if (points.length < 2 || !values.length) { x = null; box.replaceChildren(h("p", {class: "empty"}, "Nothing to draw yet: two points make a line.")); return; }
    let low = zero ? 0 : Math.min(...values), high = Math.max(...values);
    if (high <= low) high = low + (zero ? 1 : Math.max(1, Math.abs(low) * 1e-3));
    const from = points[0].at, to = Math.max(points.at(-1).at, from + 1);
    x = t => L + (W - L - R) * (t - from) / (to - from);
    const y = v => floor - (floor - T) * (v - low) / (high - low);
    const name = time ? v => clock(v, high - low) : unit;
    const svg = h("svg", {viewBox: `0 0 ${W} ${H}`, width: W, height: H, role: "img", tabindex: 0, "aria-label": says(name)});
    for (const v of time ? timeTicks(low, high, 5) : duration && high > 60 ? timeTicks(low * 1000, high * 1000, 4).map(v => v / 1000) : ticks(low, high, 4)) svg.append(
      h("line", {x1: L, x2: W - R, y1: y(v), y2: y(v), class: "grid"}), h("text", {x: L - 8, y: y(v) + 4, "text-anchor": "end"}, name(v)));
    let last = L - 38; // the first label stays clear of the zone
    for (const t of timeTicks(from, to, W / 90)) if (x(t) - last > 62 && x(t) < W - R - 20) { last = x(t); svg.append(h("text", {x: last, y: H - 6, "text-anchor": "middle"}, clock(t, to - from))); }
    svg.append(h("text", {x: L - 8, y: H - 6, "text-anchor": "end"}, "UTC"));
    points.forEach((p, i) => { if (i && p.timeline !== points[i - 1].timeline) svg.append(
      h("line", {x1: x(p.at), x2: x(p.at), y1: T, y2: floor, class: "fork"}), h("text", {x: x(p.at) - 5, y: T + 9, "text-anchor": "end"}, "restored")); });
    if (held) strips(svg, floor + 4);
    for (const s of series) svg.append(h("path", {d: path(s, y), class: s.wide ? "line wide" : "line", stroke: s.colour, "stroke-dasharray": s.dash}), ...points.filter((p, i) => windows && has(s, p) && !has(s, points[i - 1]) && !has(s, points[i + 1])).map(p => h("circle", {cx: x(p.at), cy: y(s.value(p)), r: 2.5, fill: s.colour})));
    let free = T;
    if (named) for (const [s, v] of series.map(s => [s, s.value(points.findLast(p => has(s, p)))]).filter(([, v]) => v !== null && v !== undefined).sort((a, b) => b[1] - a[1])) {
      free = Math.max(free, Math.min(y(v), floor - 4)) + 12; // names below each other, each as near to its line as the others allow
      if (free < H) svg.append(h("text", {x: W - R + 6, y: free - 8, class: "name"}, s.name.length > 14 ? s.name.slice(0, 13) + "…" : s.name));
    }
    cross = h("line", {y1: T, y2: floor + strip, class: "cross", visibility: "hidden"});
    dots = series.map(s => h("circle", {r: 3.5, fill: s.colour, visibility: "hidden"}));
    svg.append(cross, ...dots);
    dots.place = y;
    const stood = box.contains(document.activeElement);
    box.replaceChildren(svg);
    if (stood) svg.focus({preventScroll: true});
    pointer();
  }
  const has = (s, p) => p && s.value(p) !== null && s.value(p) !== undefined;
  function path(s, y) {
    let d = "", pen = "M";
    points.forEach((p, i) => {
      const v = s.value(p);
      if (v === null || v === undefined || (i && p.timeline !== points[i - 1].timeline)) pen = "M";
      if (v === null || v === undefined) return;
      d += `${pen}${x(p.at).toFixed(1)},${y(v).toFixed(1)}`;
      pen = "L";
    });
    return d;
  }
  function strips(svg, top) {
    points.forEach((p, i) => {
      const who = held(p), next = points[i + 1], end = next && next.timeline === p.timeline ? x(next.at) : x(p.at) + 2;
      if (who) svg.append(h("rect", {x: x(p.at), y: top, width: Math.max(1, end - x(p.at)), height: 6, fill: who.colour}));
    });
  }
  const says = name => `${label}. ` + series.map(s => { const v = s.value(points.at(-1)); return `${s.name} ${v === null || v === undefined ? "unknown" : name(v)}`; }).join(", ") + ". Arrow keys read single points.";
  function pointer() {
    const p = at === null || !x ? null : points[at];
    cross?.setAttribute("visibility", p ? "visible" : "hidden");
    series.forEach((s, i) => {
      const v = p ? s.value(p) : null, dot = dots?.[i];
      if (!dot) return;
      dot.setAttribute("visibility", v === null || v === undefined ? "hidden" : "visible");
      if (v !== null && v !== undefined) { dot.setAttribute("cx", x(p.at)); dot.setAttribute("cy", dots.place(v)); }
    });
    if (p) { cross.setAttribute("x1", x(p.at)); cross.setAttribute("x2", x(p.at)); }
    const full = time ? v => `${when(v)} UTC` : unit, q = p || points.at(-1);
    const holder = q && held?.(q);
    readout.replaceChildren(...(q ? [h("span", {class: "soft"}, p ? windows ? `${when(q.at)} UTC` : `epoch ${q.slot}, ${when(q.at).slice(11)} UTC` : "newest"),
      ...series.map(s => { const v = s.value(q); return h("span", {}, h("i", {css: {background: swatch(s)}}), `${s.name} `, h("b", {}, v === null || v === undefined ? "–" : full(v))); }),
      holder ? h("span", {}, "held by ", h("b", {}, holder.name)) : null].filter(Boolean) : []));
  }
  function list() {
    if (!numbers.open) return;
    const full = time ? when : unit;
    numbers.lastChild.replaceChildren(h("table", {class: "small", "aria-label": label},
      h("thead", {}, h("tr", {}, [...(windows ? ["Window (UTC)"] : ["Epoch", "Sealed (UTC)"]), ...series.map(s => time ? `${s.name} (UTC)` : s.name), ...(held ? ["Held by"] : [])].map(t => h("th", {scope: "col"}, t)))),
      h("tbody", {}, points.slice(-20).reverse().map(p => h("tr", {}, [...(windows ? [] : [p.slot]), when(p.at), ...series.map(s => { const v = s.value(p); return v === null || v === undefined ? "–" : full(v); }), ...(held ? [held(p)?.name || "–"] : [])]
        .map(c => h("td", {class: "num"}, c)))))));
  }
  function update(newPoints, newSeries) {
    const moved = points.length && newPoints.length ? newPoints.findIndex(p => at !== null && points[at] && p.slot === points[at].slot) : -1;
    if (at !== null) at = moved >= 0 ? moved : null;
    points = newPoints;
    series = newSeries;
    again();
    pointer();
    list();
  }
  return {node, update};
}

/** Bars of lateness, stacked by source, with the advisor's curve over them: the share of rows that a lag would leave late. */
export function histogram(label) {
  let data = null, seen = null, lookOf = null;
  const names = h("ul", {class: "legend"});
  const {node: plot, again} = canvas("plot", draw);
  const node = h("div", {class: "chart"}, plot, names);
  const short = s => s < 60 ? s + " s" : s < 3600 ? s / 60 + " min" : s < 86400 ? s / 3600 + " h" : s / 86400 + " d";
  function draw(box, W) {
    const sources = data ? Object.entries(data.sources) : [], right = 46;
    const sums = data ? [...data.bars, null].map((_, i) => sources.reduce((n, [, s]) => n + s.bars[i], 0)) : [];
    if (!sources.some(([, s]) => s.rows)) { box.replaceChildren(h("p", {class: "empty"}, "No row was read in these epochs, so there is no lateness to show.")); return; }
    const H = 230, floor = H - 42, high = Math.max(...sums, 1), n = sums.length, step = (W - L - right) / n;
    const y = v => floor - (floor - T) * v / high;
    const late = sources.reduce((m, [, s]) => Math.max(m, s.curve[0]?.[0] === 0 ? s.curve[0][1] : 1), 0) || 1;
    const yShare = v => floor - (floor - T) * Math.min(1, v / late);
    const svg = h("svg", {viewBox: `0 0 ${W} ${H}`, width: W, height: H, role: "img", "aria-label": `${label}. ` + sources.map(([name, s]) => `${name}: ${s.targets.map(t => `a lag of ${span(t.lag)} leaves ${t.share * 100} % late`).join(", ")}`).join("; ")});
    for (const v of ticks(0, high, 4)) svg.append(h("line", {x1: L, x2: W - right, y1: y(v), y2: y(v), class: "grid"}), h("text", {x: L - 8, y: y(v) + 4, "text-anchor": "end"}, count(v)));
    for (const part of [0, .5, 1]) svg.append(h("text", {x: W - right + 8, y: yShare(part * late) + 4}, (part * late * 100).toFixed(late < .1 ? 1 : 0) + " %"));
    const every = Math.ceil(46 / step);
    sums.forEach((total, i) => {
      let base = 0;
      sources.forEach(([name, s]) => { const v = s.bars[i]; if (v) svg.append(h("rect", {x: L + i * step + 1, width: Math.max(1, step - 2), y: y(base + v), height: y(base) - y(base + v), fill: lookOf(name).colour, class: "bar"}, h("title", {}, `${name}: ${count(v)} rows up to ${i < data.bars.length ? short(data.bars[i]) : "more"} behind`))); base += v; });
      if (i % every === 0 && i < data.bars.length) svg.append(h("text", {x: L + (i + 1) * step, y: floor + 16, "text-anchor": "middle"}, short(data.bars[i])));
    });
    svg.append(h("text", {x: (L + W - right) / 2, y: H - 6, "text-anchor": "middle"}, "behind the newest row of its partition; as a lag"));
    const x = lag => { // along the unequal bars: each bar is a step, straight within it
      let low = 0;
      for (let i = 0; i < data.bars.length; i++) { if (lag <= data.bars[i]) return L + step * (i + (lag - low) / (data.bars[i] - low)); low = data.bars[i]; }
      return W - right;
    };
    sources.forEach(([name, s]) => svg.append(h("path", {class: "line curve", stroke: lookOf(name).colour, "stroke-dasharray": lookOf(name).dash, d: s.curve.map(([lag, left], i) => `${i ? "L" : "M"}${x(lag).toFixed(1)},${yShare(left).toFixed(1)}`).join("")})));
    box.replaceChildren(svg);
  }
  return {node, update(next, looks) {
    lookOf = looks;
    const text = JSON.stringify(next);
    if (text === seen) return;
    seen = text; data = next;
    names.replaceChildren(...Object.keys(next.sources).map(name => h("li", {}, h("i", {css: {background: swatch(lookOf(name))}}), name)), h("li", {class: "soft"}, "bars: rows; lines: share that would be late at that lag"));
    names.hidden = !Object.values(next.sources).some(s => s.rows);
    again();
  }};
}

const TONES = {complete: "good", incomplete: "warn"};
const SHAPES = {good: s => h("circle", {r: 5, ...s}), warn: s => h("polygon", {points: "0,-6 6,5 -6,5", ...s}), bad: s => h("rect", {x: -5, y: -5, width: 10, height: 10, ...s})};
export const toneOf = outcome => TONES[outcome] || "bad";

/** One lane per member: when each arrived at each barrier, who waited for whom, who never came. */
export function barrierLanes(label) {
  let barriers = [], open = [], members = [];
  const {node, again} = canvas("plot", draw);
  function draw(box, W) {
    const pad = Math.min(Math.max(110, W * .3), 14 + 7 * Math.max(6, ...members.map(m => m.length))), most = Math.floor((pad - 14) / 7), lane = 22, H = T + lane * (members.length + 1) + 22;
    const fit = Math.max(3, Math.floor((W - pad) / 54) - open.length), shown = barriers.slice(0, Math.min(12, fit)).reverse();
    const columns = shown.length + open.length;
    if (!columns) { box.replaceChildren(); return; }
    const step = (W - pad - 8) / columns;
    const svg = h("svg", {viewBox: `0 0 ${W} ${H}`, width: W, height: H, role: "img", "aria-label": `${label}: the newest ${shown.length} barriers, left to right; the table below says the same.`});
    members.forEach((member, i) => svg.append(h("text", {x: pad - 10, y: T + lane * i + 15, "text-anchor": "end"}, h("title", {}, member), member.length > most ? "…" + member.slice(1 - most) : member), h("line", {x1: pad, x2: W - 8, y1: T + lane * i + 11, y2: T + lane * i + 11, class: "grid"})));
    svg.append(h("text", {x: pad - 10, y: T + lane * members.length + 15, "text-anchor": "end"}, "waited"));
    [...shown, ...open.map(b => ({...b, open: true, tardy: []}))].forEach((b, c) => {
      const mid = pad + step * (c + .5), tone = b.open ? "off" : toneOf(b.outcome), inner = step * .7;
      const g = h("g", {class: tone}, h("title", {}, `barrier ${b.id}: ${b.open ? "open" : b.outcome}` + (b.missing.length ? `, without ${b.missing.join(", ")}` : "")));
      members.forEach((member, i) => {
        const y = T + lane * i + 11, arrived = b.arrivals[member];
        if (arrived !== undefined) {
          const wait = b.at > b.opened ? (arrived - b.opened) / (b.at - b.opened) : 0, x = mid - inner / 2 + inner * wait;
          g.append(h("line", {x1: x, x2: mid + inner / 2, y1: y, y2: y, class: "wait"}), h("circle", {cx: x, cy: y, r: 4, class: "arrival"}));
        } else if (b.missing.includes(member)) {
          const late = (b.tardy || []).includes(member);
          g.append(h("path", {d: `M${mid - 4},${y - 4}l8,8m0,-8l-8,8`, class: late ? "missing tardy" : "missing"}));
        }
      });
      g.append(h("text", {x: mid, y: T + lane * members.length + 15, "text-anchor": "middle"}, b.open ? "open" : step > 38 ? span(b.waited) : ""));
      if (step > 30 || c % 2 === 0) g.append(h("text", {x: mid, y: H - 4, "text-anchor": "middle"}, `#${b.id}`));
      svg.append(g);
    });
    box.replaceChildren(svg);
  }
  return {node, update(closed, unfinished) {
    barriers = closed; open = unfinished;
    members = [...new Set([...closed.slice(0, 12), ...unfinished].flatMap(b => [...Object.keys(b.arrivals), ...(b.missing || []), ...(b.ended || [])]))].sort();
    again();
  }};
}
export const shape = tone => h("svg", {viewBox: "-8 -8 16 16", width: 14, height: 14, class: `shape ${tone}`, "aria-hidden": "true"}, (SHAPES[tone] || SHAPES.bad)({}));
