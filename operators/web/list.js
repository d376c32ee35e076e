// All pipelines: what is wrong first, a filter, and why.
import {restoreSeveral} from "./dialogs.js";
import {ago, airflow, announce, breakable, count, empty, fill, h, mark, pill, plural, share, table, when} from "./dom.js";

const TONES = [["bad", "Broken"], ["warn", "Attention"], ["good", "Well"], ["off", "At rest"]];
const rank = {bad: 0, warn: 1, good: 2, off: 3};

export function listPage(open) {
  let streams = [], broken = [], chosen = sessionStorage.getItem("tone") || "", before = {};
  const words = h("input", {type: "search", id: "filter", placeholder: "Name, source or reason", autocomplete: "off", spellcheck: "false", input: () => show()});
  const chips = h("div", {class: "chips", role: "group", "aria-label": "State"});
  const found = h("p", {class: "soft", role: "status", id: "found"});
  const body = h("div", {class: "card list"}), wrong = h("div", {}), restorable = s => s.checkpoint && s.may_restore;
  const several = h("button", {id: "restore-several", hidden: true, click: () => restoreSeveral(streams.filter(s => restorable(s) && matches(s)))}, "Restore several…");
  const node = h("div", {}, h("header", {class: "top"}, h("h1", {}, "Streams")), h("div", {class: "tools"}, h("label", {class: "search"}, h("span", {class: "unseen"}, "Filter"), words), chips, several, found), wrong, body);

  function choose(tone) { chosen = chosen === tone ? "" : tone; sessionStorage.setItem("tone", chosen); show(); }
  function matches(s) {
    const text = words.value.trim().toLowerCase();
    return (!chosen || s.tone === chosen) && (!text || JSON.stringify([s.pipeline, s.state, s.why, s.holder, s.findings, Object.keys(s.latest?.members || {})]).toLowerCase().includes(text));
  }
  function why(s) {
    if (s.findings.length) return h("ul", {class: "findings"}, s.findings.map(f => h("li", {class: f.tone}, mark(f.tone), f.says)));
    const text = s.why || (s.holder && s.tone === "good" ? `frontier held by ${s.holder.member}: ${s.holder.why}` : "");
    return text ? h("span", {class: "soft"}, text) : null;
  }
  function row(s) {
    return {"data-pipeline": s.pipeline, click: event => { if (!event.target.closest("a") && !getSelection().toString()) open(s.pipeline); }, class: "open",
      cells: [h("a", {href: `#/${s.pipeline}`, id: `open-${s.pipeline}`, class: "name"}, breakable(s.pipeline)), pill(s.tone, s.state), why(s),
        h("span", {class: "num nowrap"}, when(s.latest?.frontier)), ago(s.sealed_at), count(s.latest?.read), s.latest ? share(s.latest.late, s.latest.read) : "–"]};
  }
  function show() {
    const shown = streams.filter(matches).sort((a, b) => rank[a.tone] - rank[b.tone] || a.pipeline.localeCompare(b.pipeline));
    fill(chips, [chosen, streams.map(s => s.tone)], () => TONES.map(([tone, name]) => {
      const n = streams.filter(s => s.tone === tone).length;
      return h("button", {class: `chip ${tone}`, id: `chip-${tone}`, "aria-pressed": String(chosen === tone), disabled: !n && chosen !== tone, click: () => choose(tone)}, mark(tone), `${name} ${n}`);
    }));
    const text = streams.length === shown.length ? plural(streams.length, "pipeline") : `${shown.length} of ${plural(streams.length, "pipeline")}`;
    if (found.textContent !== text) found.textContent = text;
    fill(body, [streams.length, shown.map(s => [s.pipeline, s.tone, s.state, s.findings, s.why, s.holder?.member, s.sealed_at, s.latest?.read])], () => {
      if (!streams.length) return empty("No pipeline yet.", h("p", {}, "A pipeline is one YAML file in the folder ", h("code", {}, "dags/pipelines"), ". Airflow finds it within a minute and shows it here."), h("p", {}, "Missing one you have written? ", airflow("/dags?tags=tidegate", "Airflow's list of DAGs"), " has tidegate.broken_specs then, which names file, line and field."));
      if (!shown.length) return empty("No pipeline fits the filter.", h("p", {}, h("button", {id: "all", click: () => { words.value = ""; chosen = ""; show(); words.focus(); }}, "Show all")));
      return table("Pipelines", ["Pipeline", "State", "Why~", "Frontier (UTC)", "Checkpoint", ">Rows read", ">Late"], shown.map(row));
    });
  }
  return {node, title: "Streams", path: () => "api/streams", update(answer) {
    streams = answer.streams;
    several.hidden = !streams.some(restorable);
    broken = answer.broken_specs || [];
    fill(wrong, broken, () => broken.length ? h("section", {class: "card list", id: "broken", "aria-labelledby": "broken-title"}, h("h2", {id: "broken-title"}, mark("bad"), "Specs that cannot be read: their pipelines have no DAGs until they are corrected"),
      table("Broken specs", ["File", "Line", "Field", "What is wrong~"], broken.map(text => { const [, file, line, field, what] = /^-? ?(.*?):(\d+): (?:([\w.[\]-]+): )?(.*)$/.exec(text) || [null, "", "–", "–", text]; return {cells: [h("code", {title: file}, file.split("/").at(-1)), line, field ? h("code", {}, field) : "–", what]}; }))) : []);
    for (const s of streams) {
      if (before[s.pipeline] && before[s.pipeline] !== s.state) announce(`${s.pipeline} is now ${s.state}`);
      before[s.pipeline] = s.state;
    }
    show();
  }};
}
