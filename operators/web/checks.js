// The quality checks: what each one saw, beside its limit and its past, who owns it, and the rows behind a failure.
import {ago, ask, card, code, empty, fill, h, mark, plural, table} from "./dom.js";

const W = 150, H = 30; // pixels of a trend
const TONE = {critical: "bad", warn: "warn"};
const short = v => v === null || v === undefined ? "–" : Math.abs(v) >= 1000 ? Math.round(v).toLocaleString("en") : String(+v.toPrecision(3));

/** The values of a check over the runs, oldest left, with its limit as a dashed line. */
function trend(check, runs) {
  const values = runs.map(run => run.values?.[check.id]).filter(v => v !== undefined);
  if (values.length < 2) return "–";
  const limit = check.limit, low = Math.min(...values), high = Math.max(...values, low + 1e-9);
  // A limit far away would flatten the line, so it is drawn only where the values come near it.
  const near = limit !== null && limit <= 2 * high && limit >= low / 2, top = near ? Math.max(high, limit) : high, floor = near ? Math.min(low, limit) : low;
  const y = v => (H - 4 - (H - 8) * (v - floor) / (top - floor || 1)).toFixed(1), says = `${plural(values.length, "run")}, from ${short(values[0])} to ${short(values.at(-1))}, lowest ${short(low)}, highest ${short(high)}`;
  return h("svg", {class: "spark", viewBox: `0 0 ${W} ${H}`, width: W, height: H, role: "img", "aria-label": says}, h("title", {}, says),
    near ? h("line", {x1: 0, x2: W, y1: y(limit), y2: y(limit), class: "fork"}) : null,
    h("path", {class: "line", stroke: "var(--s0)", d: "M" + values.map((v, i) => `${(i * W / (values.length - 1)).toFixed(1)},${y(v)}`).join("L")}));
}

export function checksPanel(pipeline) {
  const body = h("div", {}), node = card("quality", "Quality checks", body), dag = `${pipeline}.stream`;
  let seen = null;
  const bound = check => check.limit === null || check.limit === undefined ? "–" : `${check.is_least ? "at least" : "at most"} ${short(check.limit)}`;
  const facts = check => [h("span", {class: "nowrap num"}, short(check.value)), h("span", {class: "nowrap num"}, bound(check)), trend(check, runs), check.owner || "–"];
  let runs = [];
  function failure(check) {
    const columns = Object.keys(check.sample[0] || {}), cell = v => v === null || v === undefined ? "–" : typeof v === "object" ? JSON.stringify(v) : String(v);
    const broken = runs.filter(run => run.failed.includes(check.id)).length;
    return h("div", {class: "found"}, h("h3", {class: TONE[check.severity]}, mark(TONE[check.severity]), check.says),
      h("p", {class: "soft"}, `Not so: ${check.observed}. It failed in ${broken} of the last ${plural(runs.length, "run")}. `, h("a", {href: `docs/${pipeline}.quality/${check.run}/${check.page}.html`}, "Data Docs")),
      table(`Figures of ${check.id}`, ["Check", "Seen", "Limit", "Trend", "Owner"], [{cells: [code(check.id), ...facts(check)]}]),
      columns.length ? h("div", {class: "scroll", tabindex: 0}, h("div", {class: "small"}, table(`Rows behind ${check.id}`, columns, check.sample.map(row => ({cells: columns.map(name => cell(row[name]))}))))) : null,
      check.command ? h("p", {}, columns.length ? "All of them: " : "Its counts: ", code(check.command)) : null);
  }
  function draw(found) {
    runs = found.runs.slice().reverse();
    const failed = found.checks.filter(check => !check.passed), passed = found.checks.filter(check => check.passed);
    fill(body, found, () => found.checks.length ? [
      h("p", {class: "soft"}, `${plural(found.checks.length, "check")}, ${failed.length} failed, `, ago(Date.parse(found.at)), `; trends over ${plural(runs.length, "run")}.`), failed.map(failure),
      h("details", {class: "numbers", id: "passed"}, h("summary", {}, `${plural(passed.length, "check")} passed`), table("Passed checks", ["Check~", "Seen", "Limit", "Trend", "Owner"], passed.map(check => ({cells: [h("span", {title: check.id}, check.says), ...facts(check)]}))))] : empty("The quality checks have not run yet.", h("p", {}, "Airflow runs them, and so does ", code(`tidegate quality ${pipeline}`), ".")));
  }
  return {node, update(s) {
    const now = s.quality?.at || "";
    if (now === seen) return;
    seen = now;
    ask(`api/streams/${dag}/checks`).then(draw, () => { seen = null; }); // it is asked again with the next refresh
  }};
}
