// Everything that happened to a stream: narrowed by kind and word, linked, and saved as one file for a colleague.
import {ago, airflow, ask, card, checkpoint, count, empty, fill, h, span, table, when} from "./dom.js";

const EVERY = 10_000;
const KINDS = {restore: "Restores", driver: "Drivers", run: "Starts and stops", pin: "Pins", merge: "Merges", barrier: "Barriers", verdict: "Quality", spec: "Specs"};
const TONES = {restored: "good", failed: "bad", refused: "bad", rejected: "warn"};

export function timelinePanel(pipeline) {
  let more = {events: [], runs: []}, at = 0, slot = null, last = null;
  const body = h("div", {class: "tall", tabindex: 0}), word = h("input", {id: "timeline-word", type: "search", placeholder: "word, person, checkpoint", "aria-label": "Only events with this word", input: () => draw()});
  const kind = h("select", {id: "timeline-kind", "aria-label": "Kind of event", change: () => draw()}, h("option", {value: ""}, "everything"), Object.entries(KINDS).map(([value, name]) => h("option", {value}, name)));
  const node = card("trail", "Timeline", h("div", {class: "tools"}, kind, word, h("button", {id: "timeline-save", click: save}, "Save as HTML")), body);

  const took = r => r.slot - r.fork_slot > 1 ? `epochs ${count(r.fork_slot + 1)} to ${count(r.slot - 1)} of timeline ${r.timeline} left behind` : "nothing was left behind";
  function restores(s) {
    const told = new Set(s.trail.map(t => t.request));
    return [...s.restores.filter(r => !told.has(r.request_id)).map(r => ({at: r.at, kind: "restore", who: r.who, what: ["restored to ", checkpoint(r.recover_to)], why: [took(r), r.why]})),
      ...s.trail.flatMap(t => t.steps.map((step, i) => { const r = step.what === "restored" && s.restores.find(x => x.request_id === t.request); return {at: step.at / 1000, kind: "restore", who: step.who,
        what: [h("span", {class: TONES[step.what]}, i ? `${step.what} by ${step.who}` : step.what), i && !r ? null : [": back to ", checkpoint(t.target)]], why: [r ? took(r) : i || !t.head ? null : `from ${t.head}`, i ? step.detail : t.why], run: {dag: `${pipeline}.recover`, id: t.request}}; }))];
  }
  const ended = r => ({success: "done", failed: "failed"}[r.state] || r.state) + (r.ended ? ` after ${span((r.ended - r.at) / 1000)}` : "");
  const events = s => [...restores(s),
    ...s.pins.map(p => ({at: p.at, kind: "pin", who: p.who, what: ["pinned ", checkpoint(p.checkpoint), " as ", h("span", {class: "tag"}, p.name)], why: [p.why]})),
    ...s.barriers.filter(b => b.outcome !== "complete").map(b => ({at: b.at, kind: "barrier", what: [`barrier ${b.id} closed ${b.outcome}`], why: [b.missing.length ? `without ${b.missing.join(", ")}` : null]})),
    ...more.events.map(e => ({...e, what: [e.says, e.checkpoint ? [", ", checkpoint(e.checkpoint)] : null], why: [e.why]})),
    ...more.runs.map(r => ({at: r.at, kind: "run", who: r.who || "Airflow", what: [`${r.kind.replace("_", " ")}: ${ended(r)}`], why: [r.conf.reason], run: {dag: r.dag_id, id: r.run_id}}))].sort((a, b) => b.at - a.at);
  const rows = () => events(last).map(e => ({name: KINDS[e.kind], at: e.at, cells: [e.at, KINDS[e.kind], e.who || "–", h("span", {}, e.what), h("span", {}, e.why.filter(Boolean).join("; ") || "–", e.run ? [" ", airflow(`/dags/${e.run.dag}/runs/${encodeURIComponent(e.run.id)}`, "run")] : null)]}))
    .filter(row => (!kind.value || row.name === KINDS[kind.value]) && (!word.value || row.cells.slice(1).map(cell => cell.textContent ?? cell).join(" ").toLowerCase().includes(word.value.toLowerCase())));
  const list = found => table("Timeline", ["When", "Kind", "Who", "What~", "Why~"], found);
  function draw() {
    fill(body, [last.restores, last.trail, last.pins, last.barriers, more, kind.value, word.value], () => {
      const found = rows().map(({cells: [time, ...cells]}) => ({cells: [ago(Math.floor(time)), ...cells]}));
      return found.length ? list(found) : empty(kind.value || word.value ? "No event matches." : "Nothing has happened yet.");
    });
  }
  /** One file without scripts, which opens anywhere; its times are instants. */
  function save() {
    const page = list(rows().map(({cells: [time, ...cells]}) => ({cells: [`${when(time)} UTC`, ...cells.map(cell => cell.cloneNode?.(true) ?? cell)]})));
    page.querySelectorAll("a").forEach(link => { link.href = new URL(link.getAttribute("href"), location.href).href; });
    const title = h("h1", {}, `${pipeline}: what happened until ${when(Date.now())} UTC`);
    const style = "body{font:14px system-ui;margin:2em}table{border-collapse:collapse}td,th{border-bottom:1px solid #ccc;padding:4px 12px;text-align:left;vertical-align:top}";
    const link = h("a", {href: URL.createObjectURL(new Blob([`<!doctype html><meta charset="utf-8"><title>${pipeline}</title><style>${style}</style>${title.outerHTML}${page.outerHTML}`], {type: "text/html"})), download: `${pipeline}-timeline.html`});
    link.click();
    URL.revokeObjectURL(link.href);
  }
  return {node, update(s) {
    last = s;
    draw();
    const now = [s.slot, s.timeline, s.state, s.driver?.token, s.quality?.at].join();
    if (now === slot || Date.now() - at < EVERY) return;
    slot = now;
    at = Date.now();
    ask(`api/streams/${pipeline}.stream/timeline`).then(found => { more = found; draw(); }, () => {}); // what is shown stays, and it is asked again
  }};
}
