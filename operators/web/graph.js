// What the rows of a pipeline pass, from sources to sinks, with rows, backlog, quality and freshness.
import {card, count, fill, h, mark, plural, span, table} from "./dom.js";

const W = 168, H = 56, GAP = 44, ROW = 12; // a node, and the least room beside and below it
const SMALLEST = .85; // a wide graph shrinks so far, and then scrolls
const short = (text, most = 23) => text.length > most ? text.slice(0, most - 1) + "…" : text;
const perSecond = rate => `${rate >= 20 ? count(Math.round(rate)) : +rate.toFixed(1)} rows/s`;
const isFirst = e => e.from.startsWith("source:"); // these edges are named where they begin, the others where they end

/** Rows per second over the newest epochs of one timeline: of each source, and of the rows put aside. None if the points are a
 * sample of a long past. The time since the newest epoch counts, so the rates of a stream that stands still go down. */
function measureRates(points) {
  const last = points.at(-1), first = points.slice(-10).find(p => p.timeline === last.timeline);
  if (!last || last.slot - first.slot >= 10) return {};
  const seconds = (Math.max(Date.now() - 10_000, last.at) - first.at) / 1000;
  if (seconds <= 0) return {};
  const sums = p => ({late: p.late, dead_letters: p.dead, ...Object.fromEntries(Object.entries(p.sources).map(([name, s]) => [`source:${name}`, s.read || 0]))});
  const before = sums(first);
  return Object.fromEntries(Object.entries(sums(last)).map(([id, n]) => [id, (n - (before[id] || 0)) / seconds]));
}

export function graphPanel() {
  let graph = null, rows = {}, rates = {};
  const plot = h("div", {class: "scroll", tabindex: 0, role: "region", "aria-label": "Pipeline graph"}), listed = h("div", {class: "scroll", tabindex: 0});
  const node = card("graph", "Pipeline", plot, h("details", {class: "numbers"}, h("summary", {}, "As a table"), listed));
  node.hidden = true;
  const rowsOf = n => rows[n.id] ?? n.rows;
  const detail = n => [rowsOf(n) === undefined ? null : plural(rowsOf(n), "row"), n.note].filter(Boolean).join(", ");
  const words = e => [rates[e.from] && isFirst(e) ? perSecond(rates[e.from]) : rates[e.to] && !e.back ? perSecond(rates[e.to]) : null, e.kind ? `${e.kind} ${e.label}` : e.label, e.held ? "holds the frontier" : null, e.fresh === null || e.fresh === undefined ? null : `p95 visible ${span(e.fresh)}`].filter(Boolean);

  function draw() {
    const columns = [];
    for (const n of graph.nodes) (columns[n.column] ||= []).push(n);
    const used = columns.filter(Boolean), tallest = Math.max(...used.map(c => c.length));
    const gaps = used.map(column => Math.max(GAP, ...graph.edges.filter(e => column.some(n => n.id === (isFirst(e) ? e.from : e.to))).flatMap(words).map(text => 18 + 6.6 * Math.min(23, text.length)))), starts = [0];
    used.slice(1).forEach((column, i) => starts.push(starts[i] + W + (i ? gaps[i + 1] : Math.max(gaps[0], gaps[1]))));
    const width = starts.at(-1) + W, height = tallest * (H + ROW) - ROW + 24, at = {}, into = {};
    used.forEach((column, i) => column.forEach((n, j) => { at[n.id] = {x: starts[i], y: (height - column.length * (H + ROW) + ROW) / 2 + j * (H + ROW)}; }));
    const edges = graph.edges.filter(e => at[e.from] && at[e.to]).map(e => {
      const a = at[e.from], b = at[e.to], [x1, y1, x2, y2] = [a.x + W, a.y + H / 2, b.x, b.y + H / 2];
      const middle = (x1 + x2) / 2, path = e.back ? `M${a.x + W / 2} ${a.y + H}C${a.x + W / 2} ${height + 20} ${b.x + W / 2} ${height + 20} ${b.x + W / 2} ${b.y + H}` : x2 > x1 ? `M${x1} ${y1}C${middle} ${y1} ${middle} ${y2} ${x2} ${y2}` : `M${x1} ${y1}C${x1 + 40} ${y1} ${x1 + 40} ${y2} ${x1} ${y2}`;
      const nth = into[e.to] = (into[e.to] ?? -1) + (words(e).length ? 1 : 0), first = isFirst(e), lines = words(e), below = first && y2 < y1;
      return [h("g", {class: `edge ${e.tone || "off"}`}, h("path", {d: path})), h("g", {class: "edge"}, lines.map((text, i) => h("text", {x: first ? x1 + 6 : x2 - 6, y: below ? y1 + 14 + 13 * i : (first ? y1 : y2) - 5 - 13 * (lines.length - 1 - i) - (first ? 0 : nth * 13), "text-anchor": first ? "start" : "end"}, short(text))))];
    });
    const boxes = graph.nodes.map(n => h("g", {class: `node ${n.tone}`, transform: `translate(${at[n.id].x} ${at[n.id].y})`},
      h("title", {}, `${n.name}, ${n.kind}. ${detail(n)}`), h("rect", {width: W, height: H, rx: 8}), h("rect", {class: "tone", width: 5, height: H, rx: 2}),
      h("text", {x: 14, y: 18, class: "name"}, short(n.name, 18)), h("text", {x: 14, y: 33}, n.kind), h("text", {x: 14, y: 48}, short(detail(n)))));
    return h("svg", {css: {width: "100%", "max-width": `${width}px`, "min-width": `${Math.round(width * SMALLEST)}px`}, viewBox: `0 -4 ${width} ${height + (graph.edges.some(e => e.back) ? 28 : 4)}`, role: "img", "aria-label": `${graph.nodes.length} parts; the table below has the same.`}, edges.map(([line]) => line), edges.map(([, text]) => text), boxes);
  }
  const name = id => graph.nodes.find(n => n.id === id)?.name || id;
  function show() {
    node.hidden = !graph;
    if (!graph || !fill(plot, [graph, rows, rates], draw)) return;
    listed.replaceChildren(table("Parts", ["Part", "Kind", ">Rows", "State", "Goes to~"], graph.nodes.map(n => ({cells: [h("span", {}, mark(n.tone), n.name), n.kind, count(rowsOf(n)), n.note || "–", graph.edges.filter(e => e.from === n.id).map(e => [name(e.to), ...words(e)].join(", ")).join("; ") || "–"]}))));
  }
  return {node, update(s, points) { graph = s.graph; rates = measureRates(points); show(); }, setRows(tables) { rows = Object.fromEntries(tables.map(t => [t.table, t.rows])); show(); }};
}
