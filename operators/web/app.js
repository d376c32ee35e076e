// Which page is shown, and its heartbeat: ask, draw, wait. Old content stays while no one answers, and says how old it is.
import {ago, ask, fill, h, mark, sentence, setNow, tick} from "./dom.js";
import {listPage} from "./list.js";
import {streamPage} from "./stream.js";

const EVERY = 2500; // milliseconds; with the server's own 1.5 s everything is shown within 5 s
const MAIN = document.getElementById("main"), BANNER = document.getElementById("banner");
const query = new URLSearchParams(location.search);
const framed = query.has("dag"); // as a panel beside a DAG or a task: that one stream
const PANEL = {recover: "checkpoints", abort_barrier: "barriers", pin: "checkpoints", deploy: "trail", quality: "quality"}; // where the panel of a DAG of this kind begins

let page = null, turn = 0, good = null, timer = 0, place = null, held = null;

function route() {
  const [, pipeline = "", section = ""] = location.hash.split("/");
  const dag = query.get("dag") || "", kind = dag.slice(dag.lastIndexOf(".") + 1);
  return framed ? {pipeline: dag.slice(0, dag.lastIndexOf(".")), section: PANEL[kind] || ""} : {pipeline: decodeURIComponent(pipeline), section};
}
function open(pipeline) { location.hash = pipeline ? `#/${pipeline}` : "#/"; }
/** Keep the section of the address in view while the panels above it fill: for 10 s at most, and until the reader acts. */
function holdInView(asked, section) {
  held?.disconnect();
  held = new ResizeObserver(() => asked.scrollTo?.(section));
  held.observe(MAIN);
  setTimeout(watch => watch.disconnect(), 10_000, held);
}
for (const act of ["wheel", "pointerdown", "touchmove", "keydown"]) addEventListener(act, () => held?.disconnect(), {passive: true});
function go() {
  held?.disconnect();
  const next = route();
  if (page && page.pipeline === next.pipeline) { if (next.section) page.scrollTo?.(next.section); return; }
  turn++;
  page = next.pipeline ? streamPage(next.pipeline, {framed, open, refresh: () => refresh(true)}) : listPage(open);
  page.pipeline = next.pipeline;
  good = null;
  place = next.section;
  document.title = page.title;
  MAIN.replaceChildren(h("h1", {class: "unseen"}, page.title), h("p", {class: "loading"}, `Reading ${next.pipeline || "the streams"}…`));
  document.getElementById("dialog").close();
  scrollTo(0, 0);
  refresh(true);
}
async function refresh(now = false) {
  clearTimeout(timer);
  if (document.hidden && !now) { timer = setTimeout(refresh, EVERY); return; }
  const mine = ++turn, asked = page;
  try {
    const answer = await ask(asked.path());
    if (mine !== turn) return;
    setNow(answer.now || answer.at);
    if (!MAIN.contains(asked.node)) { MAIN.replaceChildren(asked.node); if (good === null && !framed) MAIN.focus({preventScroll: true}); }
    asked.update(answer);
    if (place) { holdInView(asked, place); place = null; }
    good = Date.now();
    fill(BANNER, [], () => []);
  } catch (error) {
    if (mine !== turn) return;
    if (!error.status && error.status !== 0) console.error(error);
    trouble(error);
  }
  timer = setTimeout(refresh, EVERY);
}
function trouble(error) {
  fill(BANNER, [error.message, good], () => h("p", {class: "note bad"}, mark("bad"), h("span", {}, sentence(error.message), error.advice ? ` ${sentence(error.advice.charAt(0).toUpperCase() + error.advice.slice(1))}` : "", good ? h("span", {class: "soft"}, " What you see is from ", ago(good), ".") : "")));
  if (good === null) MAIN.replaceChildren(h("div", {class: "card empty"}, h("h1", {}, error.status === 404 ? "There is no such stream." : "Nothing to show yet."), h("p", {}, framed ? "" : h("a", {href: "#/"}, "All streams"))));
}
addEventListener("hashchange", go);
document.addEventListener("visibilitychange", () => { if (!document.hidden) refresh(true); });
setInterval(tick, 1000);
go();
