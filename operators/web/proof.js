// Whether the newest trouble is over: the first epoch after it, and whether tables, sinks and counts agree with the log.
import {ago, ask, card, checkpoint, count, fill, h, mark, plural, sinceThen, span} from "./dom.js";

const ENDED = ["failed", "finished"], UNDER_WAY = ["recovering", "starting", "stopping"]; // the epochs seen so far are from before it
const EVERY = 4000, RECENT = 3_600_000, PAUSE = 10_000; // milliseconds

/** A source that was idle for a while until the point before `i`, and is active at `i`. */
function returned(points, i) {
  return Object.keys(points[i].statuses).find(name => {
    let j = i - 1;
    while (j >= 0 && points[j].statuses[name] === "idle") j--;
    return points[i].statuses[name] === "active" && points[i - 1].at - points[j + 1].at >= PAUSE && j + 1 < i;
  });
}

/** The newest epoch that another driver sealed, or on another timeline, or after a pause unlike the others, or when a source came back. */
function resumption(points) {
  const gaps = points.slice(1).map((p, i) => p.at - points[i].at).sort((a, b) => a - b), usual = gaps[gaps.length >> 1] || 0;
  for (let i = points.length - 1; i > 0; i--) {
    const [p, before] = [points[i], points[i - 1]], gap = p.at - before.at;
    const how = p.timeline !== before.timeline ? `on timeline ${p.timeline}, after a restore` : p.token !== before.token ? `by the driver with token ${p.token}` : gap > Math.max(PAUSE, 5 * usual) ? "by the same driver" : null, source = how ? null : returned(points, i);
    if (how || source) return {p, gap, how: how || `with ${source} active again`};
  }
  return points[0]?.slot === 1 ? {p: points[0], gap: 0, how: "after a start from nothing"} : null;
}

export function proofPanel(pipeline) {
  let at = 0, slot = null, found = null;
  const body = h("ul", {class: "findings", "aria-live": "polite"}), node = card("proof", "Is it over?", body);
  node.hidden = true;
  const line = (good, name, ...text) => h("li", {class: good ? "good" : "warn", "data-proof": name}, mark(good ? "good" : "warn"), h("span", {}, text));
  function draw(s, begun) {
    fill(body, [begun.p.id, found, s.tone, s.state], () => [
      line(s.tone !== "bad" && !UNDER_WAY.includes(s.state), "first", "First epoch: ", checkpoint(begun.p.id), ", sealed ", ago(begun.p.at), ` ${begun.how}`, begun.gap ? `, ${span(begun.gap / 1000)} after the one before` : "", `. The stream ${ENDED.includes(s.state) ? `has ${s.state}` : `is ${s.state}`}.`),
      ...(found ? [...found.followers.map((f, i) => line(f.timeline === found.timeline, i ? "sink" : "tables", i ? `Sink ${f.name}` : "Tables", f.timeline === found.timeline ? ` follow${i ? "s" : ""} timeline ${f.timeline}: ${f.missing ? `${plural(f.missing, "epoch")} to come` : "every epoch is there"}.` : f.timeline === null ? ": nothing was written yet." : `: not rewound yet, still on timeline ${f.timeline}.`)),
        ...found.counts.map(c => line(c.sealed === c.found, "count", c.what === "read" ? `Rows read ${count(c.sealed)}, accounted for ${count(c.found)}: ` : `Rows released ${count(c.sealed)}, in the table ${c.what} ${count(c.found)}: `, c.sealed === c.found ? "equal." : "not equal."))] : [])]);
  }
  return {node, update(s, points, job) {
    const begun = resumption(points);
    node.hidden = !begun || sinceThen(begun.p.at) > RECENT;
    if (node.hidden) return;
    draw(s, begun);
    if (job || slot === s.slot + s.state && found || Date.now() - at < EVERY) return;
    at = Date.now();
    ask(`api/streams/${pipeline}.stream/results/proof`).then(answer => { found = answer; slot = answer.followers.some(f => f.missing || f.timeline !== answer.timeline) ? null : s.slot + s.state; draw(s, begun); }, () => {}); // asked again
  }};
}
