// What a person does: restore, pin, compare, check, approve. Everything that writes is a run of a DAG, started through Airflow's API.
import {ago, airflow, announce, ask, breakable, checkpoint, code, count, fill, h, insist, mark, plural, sentence, sinceThen, size, table, when} from "./dom.js";

const DIALOG = document.getElementById("dialog");
const runs = dag => `/api/v2/dags/${dag}/dagRuns`;
export const FOLLOWS = {log: "its log is cut to that batch, later files stay unread", callback: "on_restore takes later batches back", rollback: "rolled back in one commit", repeat: "may get later batches twice", announce: "a message announces that later batches come twice", refused: "nothing can take later batches back, so the restore is refused"};
const summed = counts => Object.entries(counts).filter(([, n]) => n).map(([name, n]) => `${name.replace("_", " ")} ${count(n)}`).join(", ") || "none";

function show(title, ...body) {
  DIALOG.replaceChildren(h("h2", {id: "dialog-title"}, title), ...body.flat(4).filter(Boolean));
  if (!DIALOG.open) DIALOG.showModal();
  (DIALOG.querySelector("[autofocus]") || DIALOG.querySelector("button"))?.focus();
}
const cancel = (word = "Cancel") => h("button", {type: "button", id: "dialog-close", click: () => DIALOG.close()}, word);
const problem = error => h("p", {class: "note bad", role: "alert"}, mark("bad"), h("span", {}, sentence(error.message), error.advice ? h("span", {class: "soft"}, ` Next: ${sentence(error.advice)}`) : null));

// Requests for runs go one after another: on SQLite Airflow's server writes its audit log in its event loop, and there two of them wait for each other until a time-out (infra/airflow_processes.py).
let posting = Promise.resolve();

/** Start a run, then tell how it goes until it has ended or waits for someone else; an endless one only until it has begun. */
async function start(dag, conf, say, done, endless = false) {
  const id = `manual__${new Date().toISOString()}__${Math.random().toString(36).slice(2, 10)}`;
  const posted = posting.then(() => insist(runs(dag), "POST", {logical_date: null, dag_run_id: id, conf}));
  posting = posted.catch(() => {});
  await posted;
  const link = airflow(`/dags/${dag}/runs/${encodeURIComponent(id)}`, "The run in Airflow");
  const seen = `${runs(dag)}/${encodeURIComponent(id)}`;
  for (;;) {
    const [state, tasks] = await Promise.all([ask(seen), ask(`${seen}/taskInstances`)]).catch(() => [null, null]);
    if (state) {
      const at = tasks.task_instances.filter(t => t.state && t.state !== "success").map(t => `${t.task_id}: ${t.state.replace("_", " ")}`).join(", ");
      const ended = ["success", "failed"].includes(state.state), tone = {success: "good", failed: "bad"}[state.state] || "off";
      say.replaceChildren(h("p", {class: `note ${tone}`}, mark(tone), h("span", {}, ended ? state.state === "success" ? "Done. " : "It failed. The log of the run says why. " : `${state.state}${at ? `, ${at}` : ""}. `, link)));
      if (endless && state.state === "running") { say.replaceChildren(h("p", {class: "note good"}, mark("good"), h("span", {}, "Airflow has begun. The state on this page follows within a minute. ", link))); return; }
      if (ended) { announce(state.state === "success" ? "Done" : "It failed"); done?.(state.state); return; }
      if (tasks.task_instances.some(t => t.state === "awaiting_input")) { say.append(h("p", {}, "Someone else has to approve it: here on the page of this stream, or in Airflow.")); return; }
    }
    if (!DIALOG.open) return;
    await new Promise(wake => setTimeout(wake, 1500));
  }
}

/** A form in the dialog; `send` is called with the button out of reach. */
function form(title, intro, fields, button, send) {
  const say = h("div", {"aria-live": "polite"}), go = h("button", {class: "main", id: "dialog-go"}, button), end = cancel();
  const node = h("form", {submit: async event => {
    event.preventDefault();
    const asked = on => { // what was asked for goes on without this window, so there is nothing to cancel in it
      for (const part of [go, ...node.querySelectorAll("input, select")]) part.disabled = on;
      end.textContent = on ? "Close" : "Cancel";
    };
    say.replaceChildren(h("p", {class: "soft"}, "Starting…"));
    asked(true);
    try { await send(say); }
    catch (error) { say.replaceChildren(problem(error)); asked(false); }
  }}, intro, fields, say, h("div", {class: "buttons"}, end, go));
  show(title, node);
  return {go, say};
}
const field = (name, input, note) => h("label", {class: "field"}, h("span", {}, name), input, note ? h("span", {class: "soft"}, note) : null);

/** Start the stream: a run of its own DAG, which adopts a driver or launches one. */
export function startStream(s) {
  form(`Start ${s.pipeline}`, h("p", {}, "Airflow launches a driver", s.checkpoint ? [", which goes on after ", checkpoint(s.checkpoint), "."] : ". It reads its sources from their beginning."),
    s.paused ? h("p", {class: "note warn"}, mark("warn"), h("span", {}, "Its DAG is paused, so the run would wait. ", airflow(`/dags/${s.dag_id}`, "Unpause it in Airflow"), " first.")) : null,
    "Start", say => start(s.dag_id, {}, say, undefined, true));
}

export function stopStream(s) {
  const why = h("input", {id: "why", autocomplete: "off", maxlength: 200, autofocus: true});
  const replace = h("input", {id: "replace", type: "checkbox"});
  const {go} = form(`Stop ${s.pipeline}`, h("p", {}, "The driver seals what it has read and ends. Nothing starts it again until someone presses Start."),
    [field("Reason, shown while it is stopped", why), h("label", {class: "check"}, replace, " It hangs: kill this driver. Airflow launches another one, which goes on after the newest checkpoint")], "Stop", say => start(`${s.pipeline}.stop`, {reason: why.value, replace: replace.checked}, say));
  replace.addEventListener("change", () => { go.textContent = replace.checked ? "Replace the driver" : "Stop"; });
}

const PLACE = /[^\s:]+\.ya?ml:(\d+)/;
/** The file of the spec, at the line that the error names, or that declares what it names. */
export async function showSpec(s) {
  const said = s.error?.message || "", named = /\b(?:rule|window|sink|source|column) '?([\w-]+)/.exec(said), out = h("div", {"aria-live": "polite"}, h("p", {class: "soft"}, "Reading the spec…"));
  show(`Spec of ${s.pipeline}`, out, h("div", {class: "buttons"}, cancel("Close")));
  try {
    const found = await ask(`api/streams/${s.dag_id}/spec`), line = Number(PLACE.exec(said)?.[1]) || (named ? 1 + found.lines.findIndex(text => new RegExp(`^([^#]*[\\s{,"'])?${named[1]}["']?\\s*:`).test(text)) : 0);
    out.replaceChildren(h("p", {}, code(found.file), line ? `, line ${line}` : ""), h("pre", {class: "log", tabindex: 0, "aria-label": "Lines of the spec"}, found.lines.map((text, i) => h(i + 1 === line ? "mark" : "span", {}, `${String(i + 1).padStart(4)}  ${text}\n`))));
    out.querySelector("mark")?.scrollIntoView({block: "center"});
  } catch (error) { out.replaceChildren(problem(error)); }
}

/** What the newest driver wrote, and what the class of its error means. */
export async function explain(s) {
  const error = s.error || {}, out = h("div", {"aria-live": "polite"}, h("p", {class: "soft"}, "Reading the driver's log…"));
  const place = PLACE.exec(error.message);
  const meaning = {transient: "The environment failed. The driver and Airflow try again.", fenced: "Another driver took over. The stream goes on there.", poison: "The data or the logic failed, and would fail again in the same way. A person has to act.", configuration: "The spec, a name or a credential is wrong. A person has to correct it."}[error.class];
  show(`Why ${s.pipeline} failed`, error.message ? h("dl", {class: "pairs"}, [["What", error.message], error.code ? ["Code", h("a", {href: `errors#${error.code}`, target: "_blank"}, code(error.code))] : null, error.class ? ["Class", `${error.class}. ${meaning}`] : null, ["Kept", error.kept || "everything sealed so far"], place ? ["Line of the spec", code(place[0])] : null, ["Next", error.advice || "read the log below"]].filter(Boolean)
    .map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value)))) : h("p", {}, "The driver has not said why."),
    h("p", {}, airflow(`/dags/${s.dag_id}`, "Runs in Airflow"), s.spark_ui ? [", ", h("a", {href: s.spark_ui, target: "_blank", rel: "noreferrer"}, "Spark UI of the driver")] : ". Drivers have a Spark UI if the spec sets spark.conf: spark.ui.enabled; epochs and their steps are under Throughput."),
    h("h3", {}, "End of the driver's log"), out, h("div", {class: "buttons"}, cancel("Close")));
  try {
    const found = await ask(`api/streams/${s.dag_id}/log`);
    out.replaceChildren(found.lines.length ? h("pre", {class: "log", tabindex: 0, "aria-label": `Log of attempt ${found.attempt}`}, found.lines.join("\n")) : h("p", {class: "soft"}, "No log was sent. Drivers that Airflow starts send theirs every few seconds."));
    out.querySelector("pre")?.scrollTo(0, 1e9);
  } catch (error) { out.replaceChildren(problem(error)); }
}

/** Have drivers run the file, after a look at its plan. The file may be one that only the workers have. */
export async function deploy(s) {
  const why = h("input", {id: "why", autocomplete: "off", maxlength: 200, required: true, autofocus: true});
  const report = h("div", {class: "report", "aria-live": "polite"}, h("p", {class: "soft"}, "Comparing the file with the spec that drivers run…"));
  let digest = "";
  const {go} = form(`Deploy ${s.pipeline}`, [h("p", {}, "A running driver ends after its epoch, and the next one begins with the spec in the file. If that fails, drivers run the spec before."), report],
    field("Reason, kept with the deploy", why), "Deploy", say => start(`${s.pipeline}.deploy`, {reason: why.value, digest}, say));
  const listed = (title, lines) => lines.length ? [h("h3", {}, title), h("ul", {}, lines.map(line => h("li", {}, line)))] : null;
  go.disabled = true; // until the plan is there, or cannot be
  try {
    const found = await ask(`api/streams/${s.dag_id}/deploy`);
    digest = found.digest || "";
    go.disabled = found.refused || !found.changes.length;
    report.replaceChildren(...[found.digest === null ? h("p", {}, "Nothing is deployed yet: the first driver runs the file.") : found.changes.length ? null : h("p", {}, "Nothing differs from the deployed spec."),
      found.refused ? h("p", {class: "note bad"}, mark("bad"), h("span", {}, "The plan refuses it: the state does not fit the new spec.")) : null,
      listed("What differs", found.changes), listed("Plan", found.plan)].flat().filter(Boolean));
  } catch (error) {
    report.replaceChildren(problem(error), h("p", {class: "soft"}, "So no plan is shown here. The run compares the file of Airflow's workers, and refuses what does not fit."));
    go.disabled = false;
  }
}

export async function restore(s, id) {
  const why = h("input", {id: "why", autocomplete: "off", maxlength: 200, required: true, autofocus: true});
  const dry = h("input", {id: "dry", type: "checkbox"});
  const report = h("div", {class: "report", "aria-live": "polite"}, h("p", {class: "soft"}, "Reading what this would take back…"));
  const two = s.approval ? h("p", {class: "note warn"}, mark("warn"), h("span", {}, "Another person has to approve it: your request is then shown on top of this page. You cannot approve it yourself.")) : null;
  const {go} = form(`Restore ${s.pipeline}`, [h("p", {}, "Back to ", checkpoint(id), ". The stream drains and stops, goes back, and starts again by itself."), two, report],
    [field("Reason, kept with the restore", why), h("label", {class: "check"}, dry, " Dry run: verify and report only")], s.approval ? "Ask for it" : "Restore",
    say => start(`${s.pipeline}.recover`, {checkpoint: id, reason: why.value, dry_run: dry.checked}, say));
  dry.addEventListener("change", () => { go.textContent = dry.checked ? "Verify and report" : s.approval ? "Ask for it" : "Restore"; });
  try {
    const plan = await ask(`api/streams/${s.dag_id}/impact?checkpoint=${encodeURIComponent(id)}`);
    const {retained, ...back} = plan.rows, moved = plan.epochs_rewound || plan.epochs_regained;
    report.replaceChildren(h("dl", {class: "pairs"}, [
      ["Taken back", plan.epochs_rewound ? `${plural(plan.epochs_rewound, "epoch")}, everything since ${when(plan.since)} UTC` : "nothing"],
      plan.epochs_regained ? ["Regained", plural(plan.epochs_regained, "epoch")] : null,
      moved ? ["Rows", summed(back)] : null, retained ? ["Rows that wait for their order", `${count(Math.abs(retained))} ${retained > 0 ? "fewer" : "more"}`] : null,
      ...moved ? [["Rows of tables", summed(plan.tables)], ["Window results", summed(plan.windows)]] : [],
      ...plan.sinks.map(one => [`Query ${one.query}`, `from batch ${one.newest} to ${one.batch ?? "the beginning"}; ${one.sink}: ${FOLLOWS[one.rewind] || one.rewind}`]),
      plan.spec_changed ? ["Mind", "the spec has changed since that checkpoint"] : null,
    ].filter(Boolean).map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value)))));
  } catch (error) { report.replaceChildren(problem(error)); go.disabled = true; }
}

/** Several streams at once, each back to its newest checkpoint that was sealed until a time. */
export function restoreSeveral(streams) {
  const time = h("input", {id: "restore-until", type: "datetime-local", step: 1, required: true, autofocus: true, change: () => rows.forEach(look)});
  const why = h("input", {id: "why", autocomplete: "off", maxlength: 200, required: true});
  const rows = streams.map(s => ({s, target: null, box: h("input", {type: "checkbox", id: `also-${s.pipeline}`, checked: s.tone === "bad" || s.tone === "warn"}), out: h("div", {"aria-live": "polite"}, "–")}));
  async function look(row) {
    const at = time.value; // an answer about a time that was changed since does not count
    row.target = null;
    row.out.replaceChildren("Looking…");
    try {
      const base = `api/streams/${row.s.pipeline}.stream/`, found = await insist(`${base}checkpoints?limit=1&restorable=true&until=${Date.parse(`${at}Z`)}`, "GET");
      if (!found.rows.length) throw new Error("nothing was sealed until then that can be restored");
      const plan = await insist(`${base}impact?checkpoint=${encodeURIComponent(found.rows[0].id)}`, "GET");
      if (at !== time.value) return;
      row.target = found.rows[0].id;
      row.out.replaceChildren(checkpoint(row.target), plan.epochs_rewound ? ` takes back ${plural(plan.epochs_rewound, "epoch")}` : " takes nothing back", row.s.approval ? "; another person has to approve it" : "");
    } catch (error) { if (at === time.value) row.out.replaceChildren(error.message); }
  }
  form("Restore several streams", h("p", {}, "Each stream you tick drains and stops, goes back to its newest checkpoint sealed until the time below, and starts again by itself."),
    [field("Sealed until (UTC)", time), table("Streams", ["Stream", "Back to~"], rows.map(r => ({cells: [h("label", {class: "check"}, r.box, " ", breakable(r.s.pipeline)), r.out]}))), field("Reason, kept with the restores", why)],
    "Restore them", async () => {
      const chosen = rows.filter(r => r.box.checked);
      if (!chosen.length || chosen.some(r => !r.target)) throw new Error("Tick only streams that have such a checkpoint.");
      await Promise.all(chosen.map(r => start(`${r.s.pipeline}.recover`, {checkpoint: r.target, reason: why.value, dry_run: false}, r.out).catch(error => r.out.replaceChildren(problem(error)))));
    });
}

export function pin(s, row) {
  const dag = `${s.pipeline}.pin`;
  if (row.pins.length) {
    const which = h("select", {id: "pin-name", autofocus: true}, row.pins.map(name => h("option", {}, name)));
    form("Unpin a checkpoint", h("p", {}, checkpoint(row.id), " may be retired again once no pin names it."), field("Pin", which), "Unpin",
      say => start(dag, {action: "unpin", name: which.value}, say));
    return;
  }
  const name = h("input", {id: "pin-name", autocomplete: "off", required: true, maxlength: 60, pattern: "[A-Za-z0-9][A-Za-z0-9_.:@+\\-]*", autofocus: true});
  const why = h("input", {id: "why", autocomplete: "off", maxlength: 200});
  form("Pin a checkpoint", h("p", {}, checkpoint(row.id), " is kept, and can be restored by its name, until someone unpins it."),
    [field("Name", name, "letters, digits and _.:@+-"), field("Reason", why)], "Pin", say => start(dag, {action: "pin", checkpoint: row.id, name: name.value, reason: why.value}, say));
}

export function abortBarrier(s, barrier) {
  const why = h("input", {id: "why", autocomplete: "off", maxlength: 200, required: true, autofocus: true});
  form(`Abort barrier ${barrier.id}`, h("p", {}, "The rows behind it flow on. It is recorded as aborted, without ", barrier.missing.join(", ") || "anyone missing", "."),
    field("Reason, kept with the request", why), "Abort", say => start(`${s.pipeline}.abort_barrier`, {barrier: barrier.id, reason: why.value}, say));
}

export function compare(s, id, rows) {
  const others = rows.filter(r => r.kind === "epoch" && r.id !== id);
  const same = others.find(r => r.slot < rows.find(x => x.id === id)?.slot);
  const choices = [...(same ? [[same.id, "the one before it"]] : []), ["latest", "the newest"], ...s.pins.filter(p => p.checkpoint !== id).map(p => [p.name, `pin ${p.name}`]), ...others.map(r => [r.id, r.id])];
  const other = h("select", {id: "other", "aria-label": "The other checkpoint", autofocus: true, change: () => read()}, choices.map(([value, name]) => h("option", {value}, name)));
  const out = h("div", {class: "report", "aria-live": "polite"});
  show("What differs", h("p", {}, checkpoint(id), " compared with ", other), out, h("div", {class: "buttons"}, cancel("Close")));
  const text = (v, name) => v === null || v === undefined ? "–" : typeof v === "number" ? /frontier|since|time|opened|clock|latest|newest/.test(name) && v > 1e14 ? when(v / 1000) : count(v) : typeof v === "string" ? v : JSON.stringify(v);
  const part = (title, pairs) => { const found = Object.entries(pairs); return found.length ? [h("h3", {}, title), h("div", {class: "scroll", tabindex: 0}, table(title, ["Name", "The other", "This one"], found.slice(0, 60).map(([name, pair]) => ({cells: [code(name), text(pair.left, name), text(pair.right, name)]})))), found.length > 60 ? h("p", {class: "soft"}, `and ${found.length - 60} more`) : null] : null; };
  async function read() {
    out.replaceChildren(h("p", {class: "soft"}, "Reading both…"));
    try {
      const found = await ask(`api/streams/${s.dag_id}/diff?left=${encodeURIComponent(other.value)}&right=${encodeURIComponent(id)}`);
      const rowsOf = Object.entries(found.counters);
      out.replaceChildren(...[found.left === found.right ? h("p", {}, "It is the same checkpoint.") : null, found.spec_changed ? h("p", {class: "note warn"}, mark("warn"), "The spec differs.") : null,
        rowsOf.length ? [h("h3", {}, "Rows, this one less the other"), table("Rows", ["Disposition", ">Rows"], rowsOf.map(([name, n]) => ({cells: [name.replace("_", " "), (n > 0 ? "+" : "") + count(n)]})))] : null,
        part("Rows the epochs wrote", found.tables), part("Rows in the state", found.state), part("Positions, times in UTC", found.positions), part("Frontiers, statuses, barriers, times in UTC", found.decider)].flat(4).filter(Boolean));
    } catch (error) { out.replaceChildren(problem(error)); }
  }
  read();
}

export async function inspect(pipeline, id, done) {
  const out = h("div", {"aria-live": "polite"}, h("p", {class: "soft"}, "Looking at every object it needs…"));
  show("Check a checkpoint", h("p", {}, checkpoint(id)), out, h("div", {class: "buttons"}, cancel("Close")));
  try {
    const found = await ask(`api/streams/${pipeline}.stream/verify?checkpoint=${encodeURIComponent(id)}`);
    const tone = {healthy: "good", damaged: "bad"}[found.verdict] || "warn";
    out.replaceChildren(h("p", {class: `note ${tone}`}, mark(tone), h("span", {}, found.verdict === "healthy" ? `Whole: ${plural(found.objects, "object")}, ${size(found.bytes)}, all there in the right size. A restore reads their checksums too.` : `It is ${found.verdict}.`)),
      found.findings.length ? table("Findings", ["Object~", "Problem~"], found.findings.slice(0, 20).map(f => ({cells: [code(f.key), `${f.problem}: ${f.detail}`]}))) : "");
    done();
  } catch (error) { out.replaceChildren(problem(error)); }
}

const PARKING = 3500; // milliseconds: Airflow loses an answer that comes while the task still parks

/** Restores that wait for another person's yes. */
export function questions(node, s, refresh) {
  const open = s.actions.filter(run => run.question);
  fill(node, open, () => open.map(run => {
    const q = run.question, early = PARKING - sinceThen(q.since), say = h("div", {"aria-live": "polite"});
    const barred = option => Boolean(q.refusal) && (option !== "Reject" || !q.refusal.startsWith("you have asked")); // who has asked may still withdraw it
    const answer = choice => async event => {
      const buttons = event.target.closest(".buttons").querySelectorAll("button");
      buttons.forEach(b => { b.disabled = true; });
      try {
        await insist(`${runs(run.dag_id)}/${encodeURIComponent(run.run_id)}/taskInstances/${q.task}/-1/hitlDetails`, "PATCH", {chosen_options: [choice], params_input: {}});
        say.replaceChildren(h("p", {class: "soft"}, "Answered."));
        refresh();
      } catch (error) { say.replaceChildren(problem(error)); buttons.forEach(b => { b.disabled = false; }); }
    };
    const choices = q.options.slice().reverse().map((option, i) => h("button", {class: option === "Approve" ? "main" : null, id: `answer-${run.run_id}-${i}`, disabled: early > 0 || barred(option), click: answer(option)}, option));
    if (early > 0) setTimeout(() => choices.forEach(b => { b.disabled = barred(b.textContent); }), early);
    return h("section", {class: "card question", "aria-label": q.subject}, h("h2", {}, mark("warn"), q.subject),
      h("p", {class: "soft"}, `Asked by ${run.who || "someone"}, `, ago(q.since), q.assigned.length ? `; to be answered by ${q.assigned.join(" or ")}` : "; to be answered by someone other than the person who asked"),
      q.refusal ? h("p", {class: "note off"}, mark("off"), h("span", {}, `You cannot approve this: ${q.refusal}.`)) : null,
      h("pre", {}, (q.body || "").replaceAll("```", "").replaceAll("**", "").replace(/\n{3,}/g, "\n\n").trim()), say,
      h("div", {class: "buttons"}, airflow(`/dags/${run.dag_id}/runs/${encodeURIComponent(run.run_id)}/required_actions`, "In Airflow"), choices));
  }));
}
