// The checkpoint table: paged from the newest back, held still while someone chooses in it.
import {compare, inspect, pin, restore} from "./dialogs.js";
import {ago, announce, ask, card, checkpoint, count, empty, fill, h, mark, plural, share, size, table} from "./dom.js";

export function checkpointPanel(pipeline, stream) {
  const base = `api/streams/${pipeline}.stream/checkpoints?limit=${innerWidth > 720 ? 25 : 8}`;
  let pages = [null], abandoned = false, until = "", shown = null, busy = false, again = false, slot = -1, marks = "";
  const body = h("div", {}), fresh = h("p", {class: "fresh"});
  const newest = h("button", {id: "page-newest", click: () => turn([null])}, "« Newest");
  const newer = h("button", {id: "page-newer", click: () => turn(pages.slice(0, -1))}, "‹ Newer");
  const older = h("button", {id: "page-older", click: () => turn([...pages, shown.next])}, "Older ›");
  older.disabled = true; // nothing is shown yet to be older than
  const which = h("select", {id: "which", change: () => { abandoned = which.value === "abandoned"; turn([null]); }}, h("option", {value: "lineage"}, "the current lineage"), h("option", {value: "abandoned"}, "left behind by restores"));
  const pager = h("div", {class: "pager", role: "group", "aria-label": "Pages of checkpoints"}, newest, newer, older);
  const node = card("checkpoints", "Checkpoints", h("div", {class: "choice"}, h("label", {}, "Show ", which), h("label", {}, "sealed until (UTC) ", h("input", {id: "until", type: "datetime-local", step: 1, change: event => { until = event.target.value; turn([null]); }}))), fresh, body, pager);

  async function turn(to) {
    pages = to;
    await load();
    announce(shown ? `${plural(shown.rows.length, "checkpoint")}, page ${pages.length}` : "");
  }
  async function load() {
    again = busy; // someone turned the page while one was on its way: that one is not what he asked for
    if (busy) return;
    busy = true;
    do {
      again = false;
      const place = pages.at(-1);
      try {
        shown = await ask(`${base}&abandoned=${abandoned}` + (place ? `&before=${place.join("-")}` : "") + (until ? `&until=${Date.parse(`${until}Z`)}` : ""));
        slot = shown.newest;
        draw();
      } catch (error) { fill(body, error.message, () => empty(error.message)); }
    } while (again);
    busy = false;
  }
  const held = () => body.matches(":hover") || body.contains(document.activeElement);
  function state(r) {
    if (r.kind === "stub") return h("span", {class: "soft"}, "retired");
    if (r.condemned) return h("span", {class: "bad", title: r.condemned}, mark("bad"), r.condemned.split(":")[0]);
    return r.on_lineage && r.slot === shown.newest ? h("span", {class: "good"}, mark("good"), "newest") : r.on_lineage ? "complete" : h("span", {class: "soft"}, "left behind");
  }
  function verified(r) {
    const v = r.verified;
    if (!v) return r.kind === "epoch" ? h("button", {class: "plain", id: `check-${r.id}`, "aria-label": `Check ${r.id}`, click: () => inspect(pipeline, r.id, load)}, "check") : "–";
    const tone = {healthy: "good", damaged: "bad"}[v.verdict] || "warn";
    return h("span", {class: tone}, mark(tone), v.verdict === "healthy" ? "whole" : v.verdict, v.at ? h("span", {class: "soft"}, ", ", ago(v.at)) : null);
  }
  /** The first eight digits of the spec's digest; where it changed, the fields that did. */
  const spec = r => r.spec ? h("span", {}, h("span", {title: r.spec, class: "num nowrap"}, r.spec.slice(0, 8)), r.changed ? h("details", {class: "changed"}, h("summary", {}, "changed"), h("span", {class: "small"}, r.changed)) : null) : "–";
  function judged(r, quality) {
    if (r.healthy === null) return h("span", {class: "soft"}, "not judged");
    const tone = r.healthy ? "good" : "bad";
    return h("span", {class: tone}, mark(tone), r.healthy ? "healthy" : "unhealthy", quality && r.at <= Date.parse(quality.at) ? h("span", {class: "soft"}, ", ", ago(Date.parse(quality.at))) : null);
  }
  function row(r) {
    const s = stream(), may = s?.may || [];
    return {class: r.kind === "epoch" ? null : "gone", cells: [
      h("span", {}, checkpoint(r.id), r.pins.map(name => h("span", {class: "tag"}, "pinned ", name))), state(r), ago(r.at, ""), count(r.read), share(r.late, r.read), count(r.dead), spec(r), size(r.bytes), verified(r), judged(r, s?.quality),
      r.kind !== "epoch" ? null : h("span", {class: "acts"},
        r.restorable && may.includes("recover") ? h("button", {id: `restore-${r.id}`, "aria-label": `Restore ${r.id}`, click: () => restore(s, r.id)}, "Restore…") : null,
        r.restorable && may.includes("pin") ? h("button", {id: `pin-${r.id}`, "aria-label": `${r.pins.length ? "Unpin" : "Pin"} ${r.id}`, click: () => pin(s, r)}, r.pins.length ? "Unpin…" : "Pin…") : null,
        h("button", {id: `diff-${r.id}`, "aria-label": `Diff ${r.id}`, click: () => compare(s, r.id, shown.rows)}, "Diff…"))]};
  }
  function draw() {
    const s = stream();
    newest.disabled = newer.disabled = pages.length === 1;
    older.disabled = !shown.next;
    pager.hidden = pages.length === 1 && !shown.next; // all are on this page
    fresh.replaceChildren();
    fill(body, [shown.rows, s?.may, s?.checkpoint && pages.length === 1], () => shown.rows.length
      ? table("Checkpoints", ["Checkpoint", "State", "Age", ">Rows read", ">Late", ">Dead letters", "Spec", ">Size", "Verified", "Quality", ""], shown.rows.map(row))
      : empty(abandoned ? "No restore has left a checkpoint behind." : "Nothing was sealed yet. Start… launches a driver, and the first checkpoint appears when it has read rows."));
  }
  return {node, update(s) {
    const now = JSON.stringify([s.pins, s.may, s.quality]);
    if (s.slot === slot && shown && now === marks) return;
    const first = pages.length === 1 && !abandoned && !until;
    if (shown && now === marks && (!first || held())) {
      if (first) fill(fresh, s.slot - slot, () => [h("span", {class: "soft"}, `Held still while you are in the table; ${plural(s.slot - slot, "newer checkpoint")}. `), h("button", {id: "fresh", class: "plain", click: load}, "Show")]);
      return;
    }
    marks = now;
    load();
  }};
}
