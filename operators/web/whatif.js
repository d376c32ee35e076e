// What other lags and idle timeouts would have decided, beside what happened. Reads recorded surveys; changes nothing.
import {lines} from "./chart.js";
import {card, code, count, fill, h, insist, mark, plural, sentence, share, span, table} from "./dom.js";

export function whatIfPanel(pipeline) {
  const answer = h("div", {"aria-live": "polite"}), fields = h("div", {}), told = h("p", {class: "soft"});
  const chart = lines("Output frontier, as it was and with these options", {time: true, height: 200});
  const go = h("button", {id: "whatif-go", class: "main"}, "Decide again");
  const form = h("form", {submit: event => { event.preventDefault(); decide(); }}, fields, h("div", {class: "tools"}, go));
  const node = card("whatif", "What if", h("details", {class: "numbers", id: "whatif-open", toggle: event => { if (event.target.open && !sources) decide(); }}, h("summary", {}, "Try other lags and idle timeouts"), told, form, answer));
  let sources = null, turn = 0;

  const duration = ticks => ticks === null ? "never" : `${ticks / 1e6}s`;
  function offer(present) {
    sources = Object.keys(present.sources);
    const input = (name, ticks, label) => h("label", {}, `${label} `, h("input", {id: `whatif-${name}`, name, size: 8, autocomplete: "off", placeholder: duration(ticks)}));
    fields.replaceChildren(h("div", {class: "tools"}, input("idle", present.idle, "Idle timeout of the output")),
      ...sources.map(name => h("div", {class: "tools"}, h("b", {}, name), input(`lag.${name}`, present.sources[name].lag, "lag"), input(`idle.${name}`, present.sources[name].idle, "idle timeout"))));
  }
  async function decide() {
    const mine = ++turn, asked = [...form.elements].filter(e => e.name && e.value.trim()).map(e => [e.name, e.value.trim()]);
    go.disabled = true;
    told.textContent = "Deciding again…";
    try {
      const found = await insist(`api/streams/${pipeline}.stream/results/whatif?${new URLSearchParams(asked)}`, "GET");
      if (mine === turn) { if (!sources) offer(found.present); draw(found, asked); }
    } catch (error) {
      told.textContent = "";
      answer.replaceChildren(h("p", {class: "note bad", role: "alert"}, mark("bad"), h("span", {}, sentence(error.message), error.advice ? h("span", {class: "soft"}, ` Next: ${sentence(error.advice)}`) : null)));
    }
    go.disabled = false;
  }
  const lasted = ticks => ticks === null ? "–" : span(ticks / 1e6);
  function rows({happened, other, rows_read: read, rows_late: late}) {
    const both = [happened, other], names = field => [...new Set(both.flatMap(one => Object.keys(one[field])))].sort();
    const idle = (one, name) => one.idle[name] || one.idle_us[name] ? `${count(one.idle[name] || 0)} times, ${lasted(one.idle_us[name] || 0)}` : "never";
    const bounds = ({share: [least, most], rows: [a, b]}) => least === null ? "–" : a === b ? share(a, a / least || 1) : `${(100 * least).toFixed(1)} to ${(100 * most).toFixed(1)} %`;
    return [["Delay, half of the epochs", ...both.map(one => lasted(one.delay_p50_us))], ["Delay, 99 %", ...both.map(one => lasted(one.delay_p99_us))],
      ...names("idle_us").concat(names("idle").filter(n => !names("idle_us").includes(n))).map(name => [`${name} idle`, ...both.map(one => idle(one, name))]),
      ...names("barriers").map(outcome => [`Barriers ${outcome}`, ...both.map(one => count(one.barriers[outcome] || 0))]),
      ...names("barriers").length ? [["Barriers waited, 99 %", ...both.map(one => lasted(one.barrier_wait_p99_us))]] : [],
      ...Object.entries(other.late).map(([name, one]) => [`${name} late`, share(late[name] || 0, read[name]), bounds(one)])];
  }
  function draw(found, asked) {
    told.replaceChildren(`${plural(found.epochs, "epoch")}, ${count(found.first_slot)} to ${count(found.last_slot)}. Durations as in a spec: 30s, 5m, never. An empty field keeps the present value. A survey knows only the oldest and the newest row of a source, so late rows have a lower and an upper bound. All epochs: `,
      code(["tidegate whatif", pipeline, ...asked.map(([name, text]) => { const [option, source] = name.split("."); return `--${option} ${source ? `${source}=` : ""}${text}`; })].join(" ")));
    const points = found.points.map(([slot, at, was, other]) => ({slot, at: at / 1000, timeline: 0, was: was === null ? null : was / 1000, other: other === null ? null : other / 1000}));
    fill(answer, found, () => [found.reproduced ? null : h("p", {class: "note warn"}, mark("warn"), "With their own options some epochs come out differently. This is a defect of tidegate; please report it."),
      table("What if", ["", "As it was", "With these options"], rows(found).map(cells => ({cells: cells.map((cell, i) => i ? h("span", {class: "num"}, cell) : cell)}))), chart.node]);
    chart.update(points, [{name: "as it was", colour: "var(--ink)", value: p => p.was}, {name: "with these", colour: "var(--accent)", dash: "7 4", value: p => p.other}]);
  }
  return {node};
}
