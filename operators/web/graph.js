// What the rows of a pipeline pass, from sources to sinks, with rows, backlog, quality and freshness.
import {card, count, fill, h, mark, span, table} from "./dom.js";

const W = 168, H = 56, GAP = 120, ROW = 12; // a node, and the room beside and below it
const short = text => text.length > 23 ? text.slice(0, 22) + "…" : text;

export function graphPanel() {
  let graph = null, rows = {};
  const plot = h("div", {class: "scroll", tabindex: 0, role: "region", "aria-label": "Pipeline graph"}), listed = h("div", {class: "scroll", tabindex: 0});
  const node = card("graph", "Pipeline", plot, h("details", {class: "numbers"}, h("summary", {}, "As a table"), listed));
  node.hidden = true;
  const rowsOf = n => rows[n.id] ?? n.rows;
  const detail = n => [rowsOf(n) === undefined ? null : `${count(rowsOf(n))} rows`, n.note].filter(Boolean).join(", ");
  const words = e => [e.kind ? `${e.kind} ${e.label}` : e.label, e.held ? "holds the frontier" : null, e.fresh === null || e.fresh === undefined ? null : `p95 visible ${span(e.fresh)}`].filter(Boolean);

  function draw() {
    const columns = [];
    for (const n of graph.nodes) (columns[n.column] ||= []).push(n);
    const used = columns.filter(Boolean), tallest = Math.max(...used.map(c => c.length));
    const width = used.length * (W + GAP) - GAP, height = tallest * (H + ROW) - ROW + 24, at = {}, into = {};
    used.forEach((column, i) => column.forEach((n, j) => { at[n.id] = {x: i * (W + GAP), y: (height - column.length * (H + ROW) + ROW) / 2 + j * (H + ROW)}; }));
    const edges = graph.edges.filter(e => at[e.from] && at[e.to]).map(e => {
      const a = at[e.from], b = at[e.to], [x1, y1, x2, y2] = [a.x + W, a.y + H / 2, b.x, b.y + H / 2];
      const path = e.back ? `M${a.x + W / 2} ${a.y + H}C${a.x + W / 2} ${height + 20} ${b.x + W / 2} ${height + 20} ${b.x + W / 2} ${b.y + H}` : x2 > x1 ? `M${x1} ${y1}C${x1 + GAP / 2} ${y1} ${x2 - GAP / 2} ${y2} ${x2} ${y2}` : `M${x1} ${y1}C${x1 + 40} ${y1} ${x1 + 40} ${y2} ${x1} ${y2}`;
      const nth = into[e.to] = (into[e.to] ?? -1) + (words(e).length ? 1 : 0), first = e.from.startsWith("source:");
      const lines = words(e);
      return h("g", {class: `edge ${e.tone || "off"}`}, h("path", {d: path}), lines.map((text, i) => h("text", {x: first ? x1 + 6 : x2 - 6, y: (first ? y1 : y2) - 5 - 13 * (lines.length - 1 - i) - (first ? 0 : nth * 13), "text-anchor": first ? "start" : "end"}, short(text))));
    });
    const boxes = graph.nodes.map(n => h("g", {class: `node ${n.tone}`, transform: `translate(${at[n.id].x} ${at[n.id].y})`},
      h("title", {}, `${n.name}, ${n.kind}. ${detail(n)}`), h("rect", {width: W, height: H, rx: 8}), h("rect", {class: "tone", width: 5, height: H, rx: 2}),
      h("text", {x: 14, y: 18, class: "name"}, short(n.name)), h("text", {x: 14, y: 33}, n.kind), h("text", {x: 14, y: 48}, short(detail(n)))));
    return h("svg", {width, height: height + 24, viewBox: `0 -4 ${width} ${height + 28}`, role: "img", "aria-label": `${graph.nodes.length} parts; the table below has the same.`}, edges, boxes);
  }
  const name = id => graph.nodes.find(n => n.id === id)?.name || id;
  function show() {
    node.hidden = !graph;
    if (!graph || !fill(plot, [graph, rows], draw)) return;
    listed.replaceChildren(table("Parts", ["Part", "Kind", ">Rows", "State", "Goes to~"], graph.nodes.map(n => ({cells: [h("span", {}, mark(n.tone), n.name), n.kind, count(rowsOf(n)), n.note || "–", graph.edges.filter(e => e.from === n.id).map(e => [name(e.to), ...words(e)].join(", ")).join("; ") || "–"]}))));
  }
  return {node, update(s) { graph = s.graph; show(); }, setRows(tables) { rows = Object.fromEntries(tables.map(t => [t.table, t.rows])); show(); }};
}
