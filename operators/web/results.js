// What the stream has written: a sample of each table, late rows and dead letters by reason, and where a row is.
import {lines, look} from "./chart.js";
import {card, checkpoint, code, count, empty, fill, h, insist, mark, plural, sentence, span, table, when} from "./dom.js";

const KEYS_LISTED = 60;
const EVERY = 10_000; // milliseconds between two looks at the tables
const NAMES = {reason: "Reason", output: "Output", _source: "Source"};

export function resultsPanel(pipeline, showRows, lookOf) {
  const base = `api/streams/${pipeline}.stream/results/`, get = (what, asked = {}) => insist(`${base}${what}?${new URLSearchParams(asked)}`, "GET");
  let tables = [], chosen = null, filters = {}, slot = null, at = 0, busy = false;
  const pick = h("select", {id: "results-table", "aria-label": "Table", change: () => choose(pick.value)});
  const tools = h("div", {class: "tools"}), about = h("p", {class: "soft"}, "Reading the tables…"), sample = h("div", {class: "scroll", tabindex: 0}), drawn = h("div", {}), answer = h("div", {"aria-live": "polite"});
  const chart = lines("Newest window results", {zero: true, height: 180, windows: true});
  const column = h("select", {id: "row-column", "aria-label": "Column"}), value = h("input", {id: "row-value", "aria-label": "Value", required: true, autocomplete: "off", placeholder: "value"});
  const find = h("form", {class: "tools", submit: event => { event.preventDefault(); trace(); }}, h("span", {}, "Find the row whose"), column, "is", value, h("button", {id: "row-find"}, "Find"));
  const choice = h("label", {class: "choice", hidden: true}, "Show ", pick), search = h("div", {hidden: true}, h("h3", {}, "Where is my row, and why is it late?"), find, answer); // once there is something to choose from
  const node = card("results", "Results", choice, tools, about, drawn, sample, search);

  function choose(name) { chosen = name; filters = {}; pick.value = name; load(); }
  async function load() {
    if (busy) { at = 0; return; }
    busy = true;
    at = Date.now();
    try {
      const found = await get("tables");
      tables = found.tables;
      chosen ||= (tables.find(t => t.window && t.rows) || tables[0]).table;
      showRows(tables);
      fill(pick, tables, () => tables.map(t => h("option", {value: t.table}, `${t.table}: ${plural(t.rows, "row")}`)));
      fill(column, found.columns, () => found.columns.map(name => h("option", {}, name)));
      pick.value = chosen;
      choice.hidden = search.hidden = false;
      draw(await get("sample", {table: chosen, ...filters}));
    } catch (error) { fill(about, error.message, () => [sentence(error.message), error.advice ? ` Next: ${sentence(error.advice)}` : ""]); }
    busy = false;
  }
  function draw(found) {
    const one = tables.find(t => t.table === chosen), asked = new URLSearchParams({table: chosen, ...filters}), numbers = found.chart?.aggregates || [];
    fill(tools, [chosen, found.choices, filters, numbers], () => [
      ...Object.entries(found.choices).map(([name, pairs]) => h("label", {}, `${NAMES[name]} `, h("select", {id: `only-${name}`, change: event => { filters = {...filters, [name]: event.target.value}; if (!event.target.value) delete filters[name]; load(); }},
        h("option", {value: ""}, "any"), pairs.map(([text, rows]) => h("option", {value: text, selected: filters[name] === text}, `${text} (${count(rows)})`))))),
      numbers.length > 1 ? h("label", {}, "Draw ", h("select", {id: "aggregate", change: () => plot(found.chart)}, numbers.map(name => h("option", {}, name)))) : null,
      found.matching ? h("a", {href: `${base}export?${asked}`, download: "", id: "download"}, `Download ${plural(found.matching, "row")} (CSV)`) : null]);
    fill(about, [one, found.matching, found.searched], () => [one.rows > found.searched ? `The newest ${count(found.searched)} of ${count(one.rows)} rows were searched. ` : "", one.address ? ["Address of the table, for any reader of Iceberg: ", code(one.address)] : "It has no row yet."]);
    plot(found.chart);
    const shown = found.columns.filter(name => found.rows.some(row => row[name] !== null));
    fill(sample, found.rows, () => found.rows.length ? h("div", {class: "tall", tabindex: 0}, table(`Newest rows of ${chosen}`, shown.map(name => typeof found.rows[0][name] === "number" ? `>${name}` : name), found.rows.map(row => ({cells: shown.map(name => text(row[name]))})))) : one.rows ? empty("No row matches.") : []);
  }
  const keySearch = h("input", {id: "key-search", type: "search", placeholder: "part of a key", "aria-label": "Only keys with this text", input: () => listKeys()});
  const keyList = h("div", {class: "tools", id: "keys"}), keySummary = h("summary", {id: "left-out"});
  const keyPicker = h("details", {class: "numbers", id: "key-picker"}, keySummary, keySearch, keyList);
  let plotted = null, picked = null; // the keys that someone chose; null: those with the most results
  function plot(data) {
    if (plotted?.table !== chosen) picked = null;
    plotted = data && {...data, table: chosen, all: [...new Set(data.points.flatMap(p => Object.keys(p.results)))].sort()};
    const name = data && (document.getElementById("aggregate")?.value || data.aggregates[0]);
    const isDrawn = Boolean(name && data.points.length > 1);
    fill(drawn, [isDrawn], () => isDrawn ? [chart.node, keyPicker] : []);
    if (!name) return;
    const keys = plotted.all.filter(key => (picked || data.keys).includes(key));
    keyPicker.hidden = plotted.all.length < 2;
    keySummary.textContent = `${keys.length} of ${count(data.keys.length + data.left_out)} keys are drawn${picked ? "" : data.left_out ? ", those with the most results" : ""}`;
    listKeys();
    chart.update(data.points, keys.map((key, i) => ({name: key, ...(keys.every(lookOf) ? lookOf(key) : look(i)), value: p => p.results[key]?.[name]})));
  }
  /** A box for each key that fits the search; of very many keys the first ones. */
  function listKeys() {
    const chosenKeys = picked || plotted.keys, fits = plotted.all.filter(key => key.toLowerCase().includes(keySearch.value.toLowerCase()));
    fill(keyList, [fits, chosenKeys], () => [...fits.slice(0, KEYS_LISTED).map((key, i) => h("label", {}, h("input", {type: "checkbox", id: `key-${i}`, checked: chosenKeys.includes(key), change: event => pickKey(key, event.target.checked)}), ` ${key}`)),
      fits.length > KEYS_LISTED ? h("span", {class: "soft"}, `and ${count(fits.length - KEYS_LISTED)} more: search for them`) : null]);
  }
  function pickKey(key, isDrawn) {
    const before = (picked || plotted.keys).filter(other => other !== key);
    picked = isDrawn ? [...before, key] : before;
    plot(plotted);
  }
  const text = v => v === null || v === undefined ? "–" : typeof v === "string" ? v.replace(/(\d\d:\d\d:\d\d)(\.000000)?\+00:00$/, "$1Z") : typeof v === "number" ? String(v) : JSON.stringify(v);
  async function trace() {
    answer.replaceChildren(h("p", {class: "soft"}, "Looking…"));
    try {
      const {rows} = await get("row", {[column.value]: value.value});
      answer.replaceChildren(...rows.length ? rows.map(row => h("div", {class: "found"}, h("p", {}, h("b", {}, `${row.source}/${row.partition}/${row.seq}`), row.event_time ? `, event time ${text(row.event_time)}` : "", h("span", {class: "soft"}, ` ${Object.entries(row.values).filter(([, v]) => v !== null).map(([k, v]) => `${k} ${v}`).join(", ")}`)),
        row.read ? h("p", {class: "soft"}, row.arrived ? `Arrived ${text(row.arrived)}, read` : "Read", " by ", checkpoint(row.read), `, sealed ${text(row.sealed)}.`) : null,
        h("ul", {class: "findings"}, row.places.map(place => h("li", {class: tone(place)}, mark(tone(place)), h("b", {}, `${place.output}: `), explainPlace(place)))))) : [h("p", {class: "note off"}, mark("off"), "No output has such a row. It was not read yet, or your policy dropped it.")]);
    } catch (error) { answer.replaceChildren(h("p", {class: "note bad"}, mark("bad"), h("span", {}, sentence(error.message), error.advice ? h("span", {class: "soft"}, ` Next: ${sentence(error.advice)}`) : null))); }
  }
  const tone = place => ({released: "good", counted: "good", inserted: "good", merged: "good", "dead letter": "bad", late: "warn", missing: "warn"}[place.state] || "off");
  function explainPlace({output, state, detail: d}) {
    if (output === "late") return `${state} for ${d.output} (${d.reason}). It came ${span(d.lateness_s)} behind the frontier ${text(d.missed)}${d.held_by ? `, which ${d.held_by} held` : ""}, in epoch ${d.epoch}.`;
    if (output === "events" && state === "waits") return `waits in the order buffer until the frontier passes it. The frontier is at ${text(d.frontier)}${d.member ? `, held by ${d.member}${d.since ? ` since ${when(d.since / 1000)}` : ""}: ${d.why}` : ""}.`;
    if (d.why && !d.request) return `${state}: ${d.why}`;
    return `${state}. ${Object.entries(d).filter(([, v]) => v !== null && v !== false).map(([name, v]) => `${name.replace("_", " ")} ${text(v)}`).join(", ")}`;
  }
  return {node, update(s) {
    if (!s.slot || s.slot === slot && at || Date.now() - at < EVERY || node.matches(":hover, :focus-within") && at) return;
    slot = s.slot;
    load();
  }};
}
