// Building blocks: nodes, words for numbers and times, requests.

const SVG = new Set(["svg", "path", "line", "rect", "text", "g", "circle", "polygon", "title"]);

/** A node. Everything from the server goes through text nodes: names and reasons are other people's input. */
export function h(tag, attributes, ...children) {
  const node = SVG.has(tag) ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (typeof value === "function") node.addEventListener(name, value);
    else if (name === "css") for (const [key, val] of Object.entries(value)) node.style.setProperty(key, val);
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat(4).filter(child => child !== null && child !== undefined && child !== false));
  return node;
}

/** Show new content only when it differs: what someone reads, selects or stands on is left alone. */
export function fill(node, signature, build) {
  const text = JSON.stringify(signature);
  if (node.shown === text) return false;
  const stood = node.contains(document.activeElement) ? document.activeElement.id : null;
  node.shown = text;
  node.replaceChildren(...[build()].flat(4).filter(Boolean));
  if (stood) document.getElementById(stood)?.focus({preventScroll: true});
  return true;
}

export const count = n => n === null || n === undefined ? "–" : Number(n).toLocaleString("en");
/** A message as a sentence: messages of the server come without a full stop. */
export const sentence = text => /[.!?]$/.test(text) ? text : `${text}.`;
/** A name that may break after each underscore, dash and dot, nowhere else. */
export const breakable = text => text.split(/(?<=[_.-])/).flatMap(part => [part, h("wbr")]).slice(0, -1);
export const plural = (n, word) => `${count(n)} ${word}${n === 1 ? "" : "s"}`;
export const when = ms => ms ? new Date(ms).toISOString().slice(0, 19).replace("T", " ") : "–";
export const share = (part, all) => all ? (part / all * 100).toFixed(part / all < .1 ? 1 : 0) + " %" : "–";
export const size = b => b >= 1e9 ? (b / 1e9).toFixed(1) + " GB" : b >= 1e6 ? (b / 1e6).toFixed(1) + " MB" : Math.ceil(b / 1e3) + " kB";
export function span(seconds) {
  const s = Math.max(0, seconds);
  if (s < 10) return s.toFixed(s && s < 1 ? 2 : s % 1 ? 1 : 0) + " s";
  if (s < 120) return Math.round(s) + " s";
  if (s < 7200) return Math.round(s / 60) + " min";
  if (s < 172800) return +(s / 3600).toFixed(s < 36000 ? 1 : 0) + " h";
  return +(s / 86400).toFixed(s < 864000 ? 1 : 0) + " d";
}

let skew = 0; // what the server's clock is ahead of this one
export const setNow = ms => { if (ms) skew = ms - Date.now(); };
export const sinceThen = ms => Date.now() + skew - ms;
const age = ms => span(Math.max(0, Math.round((Date.now() + skew - ms) / 1000)));
/** A time that tells its age and goes on telling it. */
export function ago(ms, after = " ago") {
  if (!ms) return "–";
  return h("time", {datetime: new Date(ms).toISOString(), title: when(ms) + " UTC", "data-at": ms, "data-after": after, class: "num"}, age(ms) + after);
}
/** A time to come that tells how far it is. */
export function until(ms) {
  return h("time", {datetime: new Date(ms).toISOString(), title: when(ms) + " UTC", "data-until": ms, class: "num"}, rest(ms));
}
const rest = ms => sinceThen(ms) < 0 ? span(Math.round(-sinceThen(ms) / 1000)) : "now";
export function tick() {
  for (const node of document.querySelectorAll("time[data-until]")) node.textContent = rest(Number(node.dataset.until));
  for (const node of document.querySelectorAll("time[data-at]")) {
    const text = age(Number(node.dataset.at)) + node.dataset.after;
    if (node.textContent !== text) node.textContent = text;
  }
}

const MARK = {good: "●", warn: "▲", bad: "■", off: "○"}; // the colour alone says nothing to many people
export const mark = tone => h("span", {class: `mark ${tone}`, "aria-hidden": "true"}, MARK[tone] || "○");
export const pill = (tone, word) => h("span", {class: `pill ${tone}`}, mark(tone), word);
export const code = text => h("code", {}, text);
/** A checkpoint's id with its attempt, which no one reads, in the background. */
export function checkpoint(id) {
  if (!id) return "the beginning";
  const cut = id.lastIndexOf("-");
  return h("code", {title: id, class: "id"}, id.slice(0, cut), h("span", {class: "attempt"}, id.slice(cut)));
}
export const empty = (text, ...more) => h("div", {class: "empty"}, h("p", {}, text), more);

/** A table; on a phone every row becomes a block, so each cell carries the name of its column. */
export function table(label, heads, rows) {
  const kind = head => head.startsWith(">") ? "right num" : head.endsWith("~") ? "wrap" : null;
  const name = head => head.replace(/^>|~$/g, "");
  return h("table", {"aria-label": label},
    h("thead", {}, h("tr", {}, heads.map(head => h("th", {scope: "col", class: kind(head)}, name(head) || h("span", {class: "unseen"}, "Actions"))))),
    h("tbody", {}, rows.map(({cells, ...attributes}) => h("tr", attributes, cells.map((cell, i) =>
      h("td", {class: kind(heads[i]), "data-head": name(heads[i])}, cell))))));
}

/** The parts of a page that stay where they are while their content changes. */
export function card(id, title, ...body) {
  return h("section", {class: "card", id, "aria-labelledby": `${id}-title`}, h("h2", {id: `${id}-title`}, title), body);
}

export class Refused extends Error {
  constructor(message, status, advice) { super(message); this.status = status; this.advice = advice; }
}
export async function ask(path, method = "GET", body = undefined) {
  let answer;
  try {
    answer = await fetch(path, {method, credentials: "same-origin", headers: body ? {"Content-Type": "application/json"} : {},
      body: body && JSON.stringify(body), signal: AbortSignal.timeout(20_000)});
  } catch (error) {
    throw new Refused(error.name === "TimeoutError" ? "Airflow did not answer within 20 s." : "Airflow does not answer.", 0, "The page tries again by itself.");
  }
  const found = await answer.json().catch(() => ({}));
  if (answer.ok) return found;
  const detail = found.detail, told = found.message || detail?.reason || (typeof detail === "string" ? detail : detail?.[0]?.msg);
  const usual = {401: "You are logged out.", 403: "You may not do that: ask someone with the right to start this DAG."}[answer.status];
  throw new Refused(usual || told || `Airflow answered ${answer.status}.`, answer.status, found.advice || (answer.status === 401 ? "Log in to Airflow and load this page again." : null));
}

/** A change that may be asked for twice: on SQLite Airflow refuses one at times (500), and an answer may be lost. 409 says that it was done before. */
export async function insist(path, method, body) {
  for (let tries = 1; ; tries++) {
    try { return await ask(path, method, body); }
    catch (error) {
      if (error.status === 409 && tries > 1) return {};
      if (tries === 4 || !(error.status === 0 || error.status >= 500)) throw error;
      await new Promise(wake => setTimeout(wake, 1000));
    }
  }
}

export function announce(text) { document.getElementById("said").textContent = text; }

/** A link to a page of Airflow. In Airflow's frame a plain link would put Airflow into itself, so the frame's owner is asked. */
export function airflow(path, ...text) {
  const go = event => {
    if (parent === window || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    const link = parent.document.createElement("a");
    link.href = path;
    parent.document.body.append(link);
    link.click();
    link.remove();
  };
  return h("a", {href: path, click: go}, text);
}
