// One pipeline: a panel for each question someone has about it.
import {barrierLanes, histogram, lines, look, shape, swatch, toneOf} from "./chart.js";
import {checkpointPanel} from "./checkpoints.js";
import {checksPanel} from "./checks.js";
import {FOLLOWS, abortBarrier, deploy, explain, questions, restore, showSpec, startStream, stopStream} from "./dialogs.js";
import {graphPanel} from "./graph.js";
import {resultsPanel} from "./results.js";
import {proofPanel} from "./proof.js";
import {timelinePanel} from "./timeline.js";
import {whatIfPanel} from "./whatif.js";
import {ago, airflow, announce, breakable, card, checkpoint, code, count, empty, fill, h, mark, pill, plural, sentence, share, sinceThen, size, span, table, until, when} from "./dom.js";

const KEPT = 120;
const WANTED = {run: "running", recovering: "restored"};
const STEP_LOOKS = [{colour: "var(--accent)", dash: "7 4"}, {colour: "var(--soft)", dash: "2 3"}]; // the colours of sources are theirs alone
const SECTIONS = [["graph", "Pipeline"], ["sources", "Frontier"], ["throughput", "Throughput"], ["results", "Results"], ["lateness", "Lateness"], ["barriers", "Barriers"], ["quality", "Quality"], ["whatif", "What if"], ["checkpoints", "Checkpoints"], ["trail", "Timeline"]];

const WORDS = {
  Epoch: "One micro-batch. It reads a part of every source, decides, writes and commits.",
  Checkpoint: "A committed epoch. You can go back to each of them with Restore.",
  Frontier: "The watermark: no further row is expected to have an earlier event time.",
  "Held by": "The source whose frontier is the lowest. The output cannot pass it.",
  Lag: "How far a source's frontier stays behind its newest row: how much disorder you allow.",
  Late: "Rows that came when the frontier had passed them. They are kept in the table late, with the reason.",
  "Dead letters": "Rows and objects that cannot be read as declared, and rows that a rule quarantined. They are kept, with the reason.",
  "Wait for their order": "Rows that were read and leave as soon as the frontier has passed them.",
  "Visible after": "From the arrival of an object until every sink shows its rows: for 50, 95 and 99 of 100 epochs.",
  Barrier: "A row in the data at which sources wait for each other.",
  "Not in the tables yet": "Committed epochs that the tables do not show. They are safe, and readers see them soon.",
  Timeline: "The number before the first dash of a checkpoint. Each restore begins a new one; the old one stays readable.",
};
const legend = () => h("details", {class: "card", id: "words"}, h("summary", {}, "What the words mean"), h("dl", {class: "pairs"}, Object.entries(WORDS).map(([word, text]) => h("div", {}, h("dt", {}, word), h("dd", {}, text)))));

export function streamPage(pipeline, {framed, open, refresh}) {
  const dag = `${pipeline}.stream`;
  let points = [], names = [], last = null, reach = KEPT, state = null;
  const head = h("header", {class: "top"}), facts = h("dl", {class: "facts"}), notes = h("div", {class: "notes"}), asked = h("div", {});
  const jump = h("nav", {class: "sections", "aria-label": "On this page"}, SECTIONS.map(([id, name]) => h("a", {"data-section": id, href: `#/${pipeline}/${id}`, click: event => { event.preventDefault(); scrollTo(id); }}, name)));
  const frontier = lines("Frontier of each source", {time: true, height: 250, held: p => holderOf(p)});
  const ahead = lines("How far each source is ahead of the output", {zero: true, height: 150, duration: true, unit: span});
  const rate = lines("Rows per second", {zero: true, unit: v => v >= 20 || v % 1 === 0 ? count(Math.round(v)) : v.toFixed(1)});
  const epoch = lines("Epoch time", {zero: true, unit: v => v >= 10 ? span(v) : v.toFixed(2) + " s"});
  const behind = histogram("Lateness of the rows read"), lanes = barrierLanes("Barriers");
  const sources = h("div", {}), targets = h("div", {}), barriers = h("div", {}), waiting = h("div", {}), requests = h("div", {}), runs = h("div", {});
  const graph = graphPanel(), results = resultsPanel(pipeline, graph.setRows, name => names.includes(name) ? lookOf(name) : null), quality = checksPanel(pipeline), whatif = whatIfPanel(pipeline), past = timelinePanel(pipeline), shelf = checkpointPanel(pipeline, () => last), proof = proofPanel(pipeline);
  const barrierCard = card("barriers", "Barriers", lanes.node, waiting, barriers), requestCard = card("requests", "Open requests and runs", requests, runs);
  const queries = h("div", {}), queryCard = card("queries", "Queries of the job", queries), lateCard = card("lateness", "Lateness and the lag it asks for", behind.node, targets);
  const spans = h("select", {id: "span", change: () => { reach = Number(spans.value); points = []; refresh(); }}, [[KEPT, "last 120 epochs"], [1000, "last 1,000"], [10000, "last 10,000"], [0, "all epochs"]].map(([v, name]) => h("option", {value: v}, name)));
  const aheadPart = h("div", {}, h("h3", {}, "Ahead of the output; at 0 it holds everyone back"), ahead.node);
  const charted = h("div", {class: "grid"},
    card("sources", "Frontier of each source", h("label", {class: "choice"}, "Show ", spans), frontier.node, aheadPart, sources),
    card("throughput", "Throughput", h("h3", {}, "Rows per second"), rate.node, h("h3", {}, "Epoch time"), epoch.node));
  const node = h("div", {}, head, jump, notes, asked, proof.node, h("div", {class: "card"}, facts), graph.node,
    charted,
    queryCard, results.node,
    h("div", {class: "grid"}, lateCard, barrierCard),
    quality.node,
    whatif.node,
    shelf.node,
    past.node, requestCard, legend());

  const shown = id => node.querySelector(`#${id}`);
  function scrollTo(id) {
    const target = document.getElementById(id);
    target?.scrollIntoView({behavior: matchMedia("(prefers-reduced-motion: reduce)").matches ? "auto" : "smooth"});
    target?.querySelector("h2")?.setAttribute("tabindex", "-1");
    target?.querySelector("h2")?.focus({preventScroll: true});
    if (!framed) history.replaceState(null, "", `#/${pipeline}/${id}`);
  }
  const isJob = s => Object.keys(s.queries || {}).length > 0;
  /** Sources in the order of their colours; those of a job have no frontier of their own. */
  const listSources = s => [...new Set([...points.flatMap(p => Object.keys(p.members)), ...Object.keys(s.latest?.sources || {})])].sort();
  const lookOf = name => look(Math.max(0, names.indexOf(name))), colourOf = name => lookOf(name).colour;
  function holderOf(p) { const name = p.holder?.split("/")[0]; return name ? {name: p.holder, colour: colourOf(name)} : null; }
  const rated = field => p => p.before && p.before.timeline === p.timeline && p.at > p.before.at ? Math.max(0, p[field] - p.before[field]) / ((p.at - p.before.at) / 1000) : null;

  function header(s) {
    fill(head, [s.tone, s.state, s.paused, s.driver, s.step, s.desired, s.may, s.checkpoint, framed], () => [
      framed ? null : h("a", {href: "#/", class: "back", id: "back", click: event => { event.preventDefault(); open(null); }}, "‹ All streams"),
      h("h1", {}, breakable(pipeline)), pill(s.tone, s.state + (s.paused ? ", DAG paused" : "")),
      h("span", {class: "soft who"}, s.driver ? `driver ${s.driver.pid} on ${s.driver.host}, token ${s.driver.token}${s.step ? ", step " + s.step : ""}` : s.desired.who ? `wanted: ${WANTED[s.desired.state] || s.desired.state}, by ${s.desired.who}${s.desired.why ? `: ${s.desired.why}` : ""}` : ""),
      control(s), s.slot && s.may.includes("deploy") ? h("button", {id: "deploy", click: () => deploy(last)}, "Deploy…") : null,
      h("span", {class: "links"}, airflow(`/dags/${dag}`, "Runs in Airflow"))]);
  }
  const REST = ["new", "stopped", "down", "failed", "finished"], DRIVEN = ["running", "waiting", "starting", "draining", "silent", "stalled"];
  function control(s) {
    if (REST.includes(s.state) && s.may.includes("stream")) return h("button", {id: "start", class: "main", click: () => startStream(last)}, "Start…");
    if (DRIVEN.includes(s.state) && s.may.includes("stop")) return h("button", {id: "stop", click: () => stopStream(last)}, "Stop…");
    return null;
  }
  /** How the newest request for a restore ended, while that is news to someone: an hour. */
  function answered(s) {
    const t = s.trail[0], step = t?.steps.at(-1), again = t && s.actions.find(r => r.run_id === t.request);
    const said = {rejected: "was rejected", refused: "was refused", failed: "failed"}[step?.what];
    if (!said || !again || sinceThen(step.at / 1000) > 3_600_000) return null;
    return h("p", {class: "note warn", id: "answer"}, mark("warn"), h("span", {}, `The restore that ${t.steps[0].who} asked for ${said} by ${step.who}`, step.detail && step.what !== "rejected" ? `: ${step.detail}` : "", ". Nothing was changed. ", airflow(`/dags/${again.dag_id}/runs/${encodeURIComponent(again.run_id)}`, "The run in Airflow")));
  }
  /** A finding as the begin of a sentence; a name at its begin stays as it is written. */
  function capital(s, text) { return Object.keys(s.latest?.members || {}).some(name => text.startsWith(name)) ? text : text.charAt(0).toUpperCase() + text.slice(1); }
  function noted(s) {
    const found = [...s.findings];
    fill(notes, [found, s.error?.advice, s.state, s.trail[0], s.actions.map(r => r.run_id)], () => [answered(s), ...found.map((f, i) => h("p", {class: `note ${f.tone}`}, mark(f.tone), h("span", {}, sentence(capital(s, f.says)), f.tone === "bad" && s.error?.advice ? h("span", {class: "soft"}, ` Next: ${sentence(s.error.advice)}`) : null, i === 0 && ["failed", "down", "stalled"].includes(s.state) ? [" ", h("button", {id: "why-failed", class: "plain", click: () => explain(last)}, "Error, log and run"), " ", h("button", {id: "spec-line", class: "plain", click: () => showSpec(last)}, "Line of the spec"), s.error?.code ? [" ", h("a", {href: `errors#${s.error.code}`, target: "_blank"}, code(s.error.code))] : null] : null)))]);
  }
  function fact(name, value, ...note) { return h("div", {}, h("dt", {}, name), h("dd", {class: "num"}, value), note.filter(Boolean).length ? h("dd", {class: "soft note-line"}, note) : null); }
  function missed(late, counts) {
    const outputs = Object.entries(counts.late_by_output).map(([output, rows]) => `${count(rows)} for ${output}`);
    const tardy = counts.tardy ? [`${plural(counts.tardy, "row")} read before a tardy barrier`] : [];
    const flagged = counts.flagged ? [`${count(counts.flagged)} released late, flagged`] : [];
    return [plural(late, "row"), ...outputs, ...flagged, ...tardy].join(", ");
  }
  function aside(counts) {
    const streams = Object.entries(counts.stream_rejections).map(([stream, rows]) => `${count(rows)} rejected by ${stream}`);
    const objects = counts.dead_objects ? [`${plural(counts.dead_objects, "whole object")}, ${plural(counts.dead_object_rows, "row")} known of them`] : [];
    const nulls = counts.nulls_filled ? [`${plural(counts.nulls_filled, "row")} with columns filled by null`] : [];
    const rules = Object.entries(counts.rules).map(([rule, rows]) => `${count(rows)} broke rule ${rule}`);
    const extra = counts.columns_left_out ? [`${plural(counts.columns_left_out, "row")} with columns left out`] : [];
    const filtered = counts.filtered ? [`${plural(counts.filtered, "row")} left out by where`] : [];
    return [...objects, ...nulls, ...extra, ...filtered, ...streams, ...rules].join(", ") || null;
  }
  const toneOf = q => q.stale && q.verdict === "pass" ? "warn" : {pass: "good", warn: "warn", fail: "bad"}[q.verdict]; // an old pass is no health
  function numbers(s) {
    const p = s.latest, q = s.quality;
    fill(facts, [p?.id, s.holder, s.unpublished, q, s.quality?.at, s.commit], () => [
      fact("Frontier", p?.final ? "end of time" : p?.frontier ? when(p.frontier).slice(0, 16) : "none yet", "event time, UTC"),
      fact("Held by", s.holder?.member || "no one", s.holder ? [s.holder.why, s.holder.since ? h("span", {}, ", for ", ago(s.holder.since, "")) : ""] : null),
      fact("Newest checkpoint", ago(s.sealed_at), s.checkpoint ? checkpoint(s.checkpoint) : null, s.commit ? h("span", {id: "commit"}, " spec of commit ", code(s.commit)) : null),
      fact("Rows read", count(p?.read), p && !isJob(s) ? `${count(p.retained)} wait for their order` : null),
      ...(isJob(s) ? [] : [ // a job has no tables of its own; Spark says per query what it dropped
        fact("Late", p ? share(p.late, p.read) : "–", p ? missed(p.late, p.counts) : null),
        fact("Dead letters", p ? count(p.dead) : "–", p ? aside(p.counts) : null),
        fact("Not in the tables yet", s.unpublished === null || s.unpublished === undefined ? "–" : plural(s.unpublished, "epoch"))]),
      fact("Quality", q ? h("span", {class: toneOf(q)}, mark(toneOf(q)), {pass: "passed", warn: "warning", fail: "failed"}[q.verdict] || q.verdict) : "not checked", q ? h("span", {}, ago(Date.parse(q.at)), ", ", h("a", {href: `docs/${pipeline}.quality/${q.docs}`}, "Data Docs")) : null)]);
  }
  function charts(s) {
    const drawn = names.filter(name => points.some(p => name in p.members));
    charted.hidden = !points.length;
    const all = points.map((p, i) => ({...p, before: points[i - 1]}));
    frontier.update(points, [...drawn.map(m => ({name: m, ...lookOf(m), value: p => p.members[m]})), {name: "output", colour: "var(--ink)", wide: true, value: p => p.frontier}]);
    aheadPart.hidden = !drawn.length;
    ahead.update(points, drawn.map(m => ({name: m, ...lookOf(m), value: p => p.members[m] === null || p.members[m] === undefined || p.frontier === null ? null : Math.max(0, p.members[m] - p.frontier) / 1000})));
    rate.update(all, [{name: "read", colour: "var(--ink)", value: rated("read")}, ...(isJob(s) ? [] : [{name: "late", colour: "var(--warn)", value: rated("late")}])]);
    const steps = ["move", "survey"].filter(name => points.some(p => p.steps[name]));
    epoch.update(points, [{name: "whole", colour: "var(--ink)", value: p => p.seconds}, ...steps.map((name, i) => ({name, ...STEP_LOOKS[i], value: p => p.steps[name]}))]);
    const held = s.holder?.member?.split("/")[0], read = Object.keys(s.latest?.sources || {});
    const lag = s.lag || {}, fresh = s.freshness || {}, measured = Object.keys(fresh).length > 0, late = s.late_uploads || {}, topics = Object.keys(lag).length > 0, uploads = Object.keys(late).length > 0;
    const extra = [...(measured ? [">Visible p50/p95/p99"] : []), ...(topics ? [">Messages behind"] : []), ...(uploads ? [">Late uploads"] : [])];
    fill(sources, [s.latest?.id, held, lag, late, fresh], () => read.length ? h("div", {class: "scroll", tabindex: 0}, table("Sources", [isJob(s) ? "Query" : "Source", ...(isJob(s) ? [] : ["Status", "Frontier (UTC)"]), ">Read", ...(isJob(s) ? [] : [">Late"]), ...extra], read.map(name => {
      const c = s.latest.sources[name];
      return {cells: [h("span", {}, h("i", {class: "key", css: {background: swatch(lookOf(name))}}), name, held === name ? h("span", {class: "tag"}, "holds") : null), ...(isJob(s) ? [] : [s.latest.statuses[name] || "–", h("span", {class: "num nowrap"}, when(s.latest.members[name]))]), count(c.read || 0), ...(isJob(s) ? [] : [share(c.late || 0, c.read)]), ...(measured ? [fresh[name] ? h("span", {class: s.stale[name] ? "nowrap warn" : "nowrap", title: `from arrival to visible: p50, p95, p99; sealed after ${fresh[name].sealed.map(span).join(" / ")}`}, s.stale[name] ? mark("warn") : null, fresh[name].visible.map(span).join(" / ")) : "–"] : []), ...(topics ? [count(lag[name] || 0)] : []), ...(uploads ? [count(late[name] || 0)] : [])]};
    }))) : empty("No row was read yet."));
    behind.update(s.lateness, lookOf);
    const wanted = Object.entries(s.lateness.sources).filter(([, found]) => found.rows);
    fill(targets, wanted, () => wanted.length ? table("Advice", ["Source", ">Rows", ">In order", ">Lag for 1 % late", ">Lag for 0.1 % late"], wanted.map(([name, found]) => ({cells: [name, count(found.rows), share(found.in_order, found.rows), ...found.targets.map(t => span(t.lag))]}))) : []);
  }
  function asked_(s) {
    const found = Object.entries(s.queries || {}), job = isJob(s);
    queryCard.hidden = !job;
    results.node.hidden = lateCard.hidden = whatif.node.hidden = job || !s.slot; // without an epoch there is nothing to show, find or decide again
    fill(queries, s.queries, () => job ? [h("div", {class: "scroll", tabindex: 0}, table("Queries", ["Query", ">Batch", ">Seconds", "Sources: rows, messages behind", "Watermark (UTC)", ">Dropped", ">State", "Sink, and what a restore does~"], found.map(([name, q]) => ({cells: [
      code(name), count(q.batch), h("span", {title: Object.entries(q.phases || {}).map(([phase, t]) => `${phase} ${t} s`).join("\n")}, q.seconds === null ? "–" : q.seconds.toFixed(2)),
      (q.sources || []).map(one => h("div", {}, code(one.name), ` ${count(one.rows)}`, one.backlog === null ? "" : `, ${count(one.backlog)} behind`, q.holder?.includes(one.name) && q.sources.length > 1 ? h("span", {class: "tag"}, "holds") : null)),
      h("span", {class: "num nowrap"}, when(q.watermark)), q.dropped ? `at least ${count(q.dropped)}` : "0", `${plural(q.state_rows, "row")}, ${size(q.state_bytes)}`, `${q.sink}: ${FOLLOWS[q.rewind] || q.rewind}`]})))),
      h("p", {class: "soft"}, "Figures of the newest sealed batch of each query. Spark counts dropped rows after partial aggregation, so the true number may be larger.")] : []);
  }
  function waits(s) {
    barrierCard.hidden = !s.barriers.length && !s.open_barriers.length;
    lanes.update(s.barriers, s.open_barriers);
    const may = s.may.includes("abort_barrier");
    fill(waiting, [s.open_barriers, may], () => s.open_barriers.length ? [h("h3", {}, "Open barriers"), table("Open barriers", ["Barrier", "Open for", "Closes in", "Missing", ""], s.open_barriers.map(b => ({cells: [
      `#${b.id}`, ago(b.opened, ""), b.closes === null ? "–" : until(b.closes), b.missing.join(", ") || "–",
      may ? h("button", {id: `abort-${b.id}`, "aria-label": `Abort barrier ${b.id}`, click: () => abortBarrier(s, b)}, "Abort…") : null]})))] : []);
    fill(barriers, [s.barriers, s.open_barriers], () => s.barriers.length ? h("div", {class: "tall", tabindex: 0}, table("Closed barriers", ["Barrier", "Outcome", "Closed", ">Waited", "Missing", "Tardy"], s.barriers.map(b => ({cells: [
      `#${b.id} ${[...new Set(b.types)].join(", ")}`, h("span", {class: toneOf(b.outcome)}, shape(toneOf(b.outcome)), b.outcome, b.homogeneous === false ? ", mixed types" : ""), ago(b.at), span(b.waited), b.missing.join(", ") || "–", b.tardy.join(", ") || "–"]})))) : empty(s.open_barriers.length ? "The first barrier is open." : "No barrier has closed yet. Barriers are rows in the data that all sources wait for."));
  }
  function open_(s) {
    requestCard.hidden = !s.requests.length && !s.actions.length;
    fill(requests, s.requests, () => s.requests.length ? table("Open requests", ["Request", "Who", "Asked", "Why~"], s.requests.map(r => ({cells: [[r.kind, r.name, r.barrier === null || r.barrier === undefined ? null : `#${r.barrier}`].filter(Boolean).join(" "), r.who, ago(Math.floor(r.at / 1000)), r.why || "–"]}))) : empty("No request is open."));
    fill(runs, s.actions, () => s.actions.length ? [h("h3", {}, "Runs in Airflow"), table("Runs", ["Run", "State", "Who", "Started", "What~"], s.actions.map(r => ({cells: [
      airflow(`/dags/${r.dag_id}/runs/${encodeURIComponent(r.run_id)}`, r.kind), runState(r), r.who || "–", ago(r.at), Object.entries(r.conf).filter(([k, v]) => v !== "" && v !== false && k !== "reason").map(([k, v]) => v === true ? k.replace("_", " ") : v).join(", ") || "–"]})))] : []);
    questions(asked, s, refresh);
  }
  function runState(r) {
    const at = r.tasks.find(t => t.state && !["success", "failed", "skipped", "removed", "upstream_failed"].includes(t.state));
    const tone = {success: "good", failed: "bad", running: "warn", queued: "off"}[r.state] || "off";
    return h("span", {class: tone}, mark(tone), r.question ? "waits for approval" : at && r.state === "running" ? `${at.task} ${at.state.replace("_", " ")}` : r.state);
  }

  return {node, title: `${pipeline} · Streams`, restore: id => restore(last, id),
    path: () => `api/streams/${dag}?span=${reach}` + (points.length && reach === KEPT ? `&since=${points.at(-1).timeline}-${points.at(-1).slot}` : ""),
    update(s) {
      points = s.partial ? [...points, ...s.points].slice(-KEPT) : s.points;
      last = s;
      names = listSources(s);
      if (state && state !== s.state) announce(`${pipeline} is now ${s.state}`);
      state = s.state;
      header(s); noted(s); numbers(s); charts(s); asked_(s); waits(s); open_(s); past.update(s); proof.update(s, points, isJob(s));
      shelf.update(s); graph.update(s, points); quality.update(s);
      for (const link of jump.children) link.hidden = Boolean(shown(link.dataset.section)?.closest("[hidden]"));
      if (!isJob(s)) results.update(s); // a job has no tables of its own
    }, scrollTo};
}
