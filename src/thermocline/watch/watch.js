// Draws the state of a run, which /events sends whole at first and then as changes. All texts are set as text, never as HTML.
"use strict";

const byId = id => document.getElementById(id);
const isNumber = value => typeof value === "number" && Number.isFinite(value);
const TIERS = [["hbm", "HBM"], ["mem", "DRAM"], ["ssd", "SSD"], ["new", "new rows"]];

/** Events on examples that the model was not trained on. */
const HELD = { valid: "validation", test: "test", progressive: "progressive validation" };

// ---- numbers with units

function scaled(value, units, base = 1000) {
  let index = 0;
  for (; Math.abs(value) >= base * 0.9995 && index < units.length - 1; index++) value /= base;
  const digits = Math.abs(value) >= 100 ? 0 : Math.abs(value) >= 10 ? 1 : 2;
  return `${Number.isInteger(value) ? value : value.toFixed(digits)}${units[index]}`;
}
const NUMBER = new Intl.NumberFormat("en");
/** A count of at most five characters, or with all digits. */
function short(value, exact = false) {
  if (!isNumber(value)) return "–";
  return exact || Math.abs(value) < 10000 ? NUMBER.format(Math.round(value)) : scaled(value, ["", " k", " M", " G", " T"]);
}
const rate = value => isNumber(value) ? (value > 0 && value < 10 && !Number.isInteger(value) ? value.toFixed(1) : short(value)) : "–";
const bytes = value => isNumber(value) ? scaled(value, [" B", " kB", " MB", " GB", " TB", " PB"]) : "–";
const percent = value => isNumber(value) ? `${(100 * value).toFixed(value > 0 && value < 0.0995 ? 1 : 0)} %` : "–";
const fixed = digits => value => isNumber(value) ? value.toFixed(digits) : "–";
function duration(seconds) {
  if (!isNumber(seconds)) return "–";
  const s = Math.max(0, Math.round(seconds)), h = Math.floor(s / 3600), m = Math.floor(s / 60) % 60;
  if (h >= 48) return `${Math.floor(h / 24)} d ${h % 24} h`;
  return h ? `${h} h ${String(m).padStart(2, "0")} min` : m ? `${m} min ${String(s % 60).padStart(2, "0")} s` : `${s} s`;
}
/** Decimals by the step between two ticks. */
const decimals = (value, step) => (value || 0).toFixed(step === undefined ? 4 : Math.max(0, Math.min(6, -Math.floor(Math.log10(step) + 1e-9))));

// ---- colours

function isDark() {
  return (document.documentElement.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
}
function labelTheme() {
  byId("theme-label").textContent = isDark() ? "Switch to light colours" : "Switch to dark colours";
}
byId("theme").addEventListener("click", () => {
  const chosen = isDark() ? "light" : "dark";
  document.documentElement.dataset.theme = chosen;
  try { localStorage.setItem("thermocline-theme", chosen); } catch { /* storage is blocked */ }
  labelTheme();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", labelTheme);
labelTheme();

// ---- charts

const CHARTS = {
  speed: new Chart(byId("chart-speed"), { title: "Speed", unit: "examples/s", zero: true, format: rate, series: [{ key: "main", label: "training" }] }),
  auc: new Chart(byId("chart-auc"), { title: "AUC", format: decimals, series: [{ key: "main", label: "training" }, { key: "valid", label: "held out", dots: true }] }),
  loss: new Chart(byId("chart-loss"), { title: "Loss", unit: "nats", format: decimals, series: [{ key: "main", label: "training" }, { key: "valid", label: "held out", dots: true }] }),
  tiers: new Chart(byId("chart-tiers"), { title: "Rows of batches by tier", stacked: true, format: percent, series: TIERS.map(([key, label]) => ({ key, label })) }),
};
let points = [];

function drawCharts() {
  const train = points.filter(p => p.event === "train"), held = points.filter(p => p.event in HELD);
  const series = (list, name) => list.filter(p => isNumber(p[name])).map(p => [p.step, p[name]]);
  CHARTS.speed.draw({ main: series(train, "examples_per_s") });
  CHARTS.auc.draw({ main: series(train, "auc"), valid: series(held, "auc") });
  CHARTS.loss.draw({ main: series(train, "loss"), valid: series(held, "logloss") });
  const used = train.map(p => [p.step, p.tiers || {}, TIERS.reduce((sum, [key]) => sum + ((p.tiers || {})[key] || 0), 0)]).filter(u => u[2] > 0);
  CHARTS.tiers.draw(Object.fromEntries(TIERS.map(([key]) => [key, used.map(([step, tiers, sum]) => [step, (tiers[key] || 0) / sum])])));
}

// ---- parts of the page

function text(id, value) {
  const element = byId(id);
  if (element.textContent !== value) element.textContent = value;
}
function list(id, pairs) {
  byId(id).replaceChildren(...pairs.map(([name, value]) => {
    const pair = document.createElement("div");
    pair.append(element("dt", "", name), element("dd", "", value));
    return pair;
  }));
}
function element(name, className, content) {
  const made = document.createElement(name);
  made.className = className;
  if (content !== undefined) made.textContent = content;
  return made;
}
function gauge(bar, share, label) {
  bar.firstElementChild.style.width = `${Math.min(100, Math.max(0, 100 * (share || 0)))}%`;
  bar.setAttribute("aria-valuenow", Math.round(100 * (share || 0)));
  if (label) bar.setAttribute("aria-valuetext", label);
}

const STATES = {
  waiting: ["Waiting", ""], training: ["Training", "good"], silent: ["Process has ended", "bad"],
  finished: ["Finished", "good"], stopped: ["Stopped", "warn"], unknown: ["State unknown", ""],
};
function drawState({ state, status, latest }) {
  let [label, kind] = STATES[state] || STATES.unknown;
  const preparing = state === "training" && status && Math.max(status.step, latest ? latest.step : 0) <= status.first_step;
  if (preparing) label = "Preparing first step";
  if (state === "training" && status && status.waiting) label = "Waiting for files";
  if (status && status.error) kind = "bad";
  const badge = byId("state");
  text("state", label);
  badge.dataset.kind = kind;
  badge.toggleAttribute("data-live", state === "training");
}

function drawAlert({ state, status, latest }) {
  const lines = [];
  if (latest && latest.damaged_partitions > 0) {
    const count = latest.damaged_partitions;
    lines.push(`Damage: ${count} ${count === 1 ? "partition is" : "partitions are"} set aside`);
    for (const [table, cause] of Object.entries(latest.damage || {})) lines.push(`${table}: ${cause}`);
  }
  if (status && status.error) lines.push(`The run stopped by an error`, String(status.error));
  if (state === "silent") lines.push("The training process ended without a last message", "Continue the run with --resume.");
  const alert = byId("alert"), joined = lines.join("\n");
  if (alert.dataset.text === joined) return;
  alert.dataset.text = joined;
  alert.hidden = !lines.length;
  alert.replaceChildren(...lines.map(line => element("p", "", line)));
}

function drawProgress({ state, status, latest, now }) {
  const step = Math.max(status ? status.step : 0, latest ? latest.step : 0), total = status ? status.total_steps : null;
  const parts = [`Step ${short(step, true)}${isNumber(total) ? ` of ${short(total, true)}` : ""}`];
  if (status && status.epochs > 1) parts.push(`epoch ${Math.min(status.epoch + 1, status.epochs)} of ${status.epochs}`);
  text("position", parts.join(" · "));
  const times = [];
  if (status) {
    const elapsed = (state === "training" ? now : status.updated) - status.started, done = step - status.first_step;
    times.push(`${duration(elapsed)} elapsed`);
    if (state === "training" && isNumber(total) && done > 0 && step < total) times.push(`about ${duration(elapsed / done * (total - step))} left`);
  }
  text("times", times.join(" · "));
  const share = state === "finished" ? 1 : isNumber(total) && total > 0 ? step / total : 0, bar = byId("bar");
  byId("bar").hidden = !isNumber(total) && state !== "finished";
  gauge(bar, share);
  const notes = [];
  if (status && status.saved) notes.push(`Checkpoint of step ${short(status.saved.step, true)} saved ${duration(now - status.saved.time)} ago, in ${rate(status.saved.seconds)} s`);
  if (status && status.ending) notes.push(status.ending[0].toUpperCase() + status.ending.slice(1));
  text("saved", notes.join(" · "));
  byId("saved").hidden = !notes.length;
}

function drawKeyFigures({ latest, status }) {
  const held = points.filter(p => p.event in HELD && isNumber(p.auc)).at(-1);
  text("speed", latest ? rate(latest.examples_per_s) : "–");
  text("speed-note", latest ? `${short(latest.examples)} examples trained` : "");
  text("auc", latest ? fixed(4)(latest.auc) : "–");
  text("auc-note", latest && isNumber(latest.ne) ? `normalized entropy ${latest.ne.toFixed(4)}` : "");
  text("valid", held ? fixed(4)(held.auc) : "–");
  const best = status && isNumber(status.best_auc) ? `, best ${status.best_auc.toFixed(4)}` : "";
  text("valid-note", held ? `${HELD[held.event]} at step ${short(held.step, true)}${best}` : "no validation yet");
  text("loss", latest ? fixed(4)(latest.loss) : "–");
  text("loss-note", latest ? `mean since the log before` : "");
}

const total = (ranks, name) => ranks.reduce((sum, rank) => sum + (isNumber(rank[name]) ? rank[name] : 0), 0);

function drawTier(key, rows, share, note, off = false) {
  const tier = byId(`tier-${key}`);
  tier.classList.toggle("off", off);
  tier.querySelector(".tier-rows").textContent = off ? "not used" : `${short(rows)} rows`;
  tier.querySelector(".tier-bytes").textContent = note;
  gauge(tier.querySelector(".gauge"), share, note);
}
function drawPipe(id, up, down, off) {
  const pipe = byId(id);
  pipe.classList.toggle("off", off);
  for (const [name, lane, value] of [["up", "left", up], ["down", "right", down]]) {
    pipe.querySelector(`.${name}`).textContent = off ? "–" : rate(value);
    const moving = pipe.querySelector(`.lane.${lane}`);
    moving.classList.toggle("still", !(value > 0));
    const speed = `${Math.min(4, Math.max(0.35, 4 - 0.75 * Math.log10(1 + value))).toFixed(1)}s`;
    if (moving.style.animationDuration !== speed) moving.style.animationDuration = speed;
  }
}
function drawTiers({ latest, state }) {
  const ranks = latest && latest.ranks || [], sum = name => total(ranks, name), idle = state !== "training";
  const gpu = sum("hbm_budget") > 0, ssd = sum("disk_total") > 0;
  const flow = byId("flow"), full = Math.max(0, ...ranks.map(r => r.disk_total ? 1 - r.disk_free / r.disk_total : 0));
  flow.hidden = !ranks.length;  // runs of earlier versions have shares only
  flow.classList.toggle("cpu", !gpu);
  for (const [key, name] of [["hbm", "hbm"], ["mem", "dram"]]) {
    const used = sum(`${name}_bytes`), limit = sum(`${name}_budget`);
    drawTier(key, sum(`${name}_rows`), limit ? used / limit : 0, `${bytes(used)} of ${bytes(limit)} budget`);
  }
  drawTier("ssd", sum("ssd_rows"), full, ssd ? `${bytes(sum("disk_bytes"))}; disk ${percent(full)} full` : "all rows are in memory", !ssd);
  drawPipe("pipe-hbm", idle ? 0 : sum("dram_to_hbm_per_s"), idle ? 0 : sum("hbm_to_dram_per_s"), !gpu);
  drawPipe("pipe-ssd", idle ? 0 : sum("ssd_to_dram_per_s"), idle ? 0 : sum("dram_to_ssd_per_s"), !ssd);
  const tables = Object.entries(latest && latest.tables || {});
  byId("shares").replaceChildren(...tables.map(([name, shares]) => {
    const box = element("div", "share"), bar = element("div", "share-bar"), legend = element("ul", "legend");
    if (tables.length > 1) box.append(element("h3", "small", name));
    for (const [key, label] of TIERS) {
      if (!isNumber(shares[key])) continue;
      const part = element("span", `seg-${key}`);
      part.style.flexGrow = shares[key];
      if (shares[key] > 0) bar.append(part);
      const item = element("li", "");
      item.append(element("span", `key ${key}`), `${label} `, element("b", "", percent(shares[key])));
      legend.append(item);
    }
    bar.setAttribute("aria-hidden", "true");
    box.append(bar, legend);
    return box;
  }));
}

function drawDetails({ latest, setup, disk }) {
  const ranks = latest && latest.ranks || [], sum = name => total(ranks, name);
  const ahead = latest && latest.ahead;
  list("ahead", !ahead ? [["State", "off"]] : [
    ["Batches ahead", short(ranks.length ? Math.min(...ranks.map(r => r.ahead_batches)) : ahead.batches)],
    ["Rows loaded ahead", short(ranks.length ? sum("ahead_rows") : ahead.rows)],
    ["Late rows", short(ranks.length ? sum("ahead_late_rows") : ahead.late_rows)],
    ["Read rate", `${rate(ranks.length ? sum("ahead_mb_per_s") : ahead.mb_per_s)} MB/s`],
    ["Memory", `${bytes(ahead.bytes)} of ${bytes(ahead.budget)}`],
  ]);
  const stores = [["Stores", bytes(sum("disk_bytes"))], ["Free on their disk", bytes(Math.min(...ranks.map(r => r.disk_free)))], ["Read", `${bytes(sum("disk_read_bytes_per_s"))}/s`], ["Written", `${bytes(sum("disk_written_bytes_per_s"))}/s`]];
  list("disk", [...(sum("disk_total") ? stores : []), ["Run folder's disk", disk ? `${bytes(disk.free)} free of ${bytes(disk.total)}` : "–"]]);
  byId("stages").replaceChildren(...Object.entries(latest && latest.stages || {}).map(([name, stage]) => {
    const box = element("div", "stage"), bar = element("div", "gauge"), busy = Math.min(1, stage.busy || 0);
    bar.append(element("span", ""));
    bar.setAttribute("role", "meter");
    bar.setAttribute("aria-label", `${name} busy`);
    gauge(bar, busy, percent(busy));
    box.append(element("span", "", name), element("b", "", `${percent(busy)} busy`), bar);
    return box;
  }));
  list("setup", Object.entries(setup || {}).map(([name, value]) => [name, String(value)]));
}

function drawRanks({ latest }) {
  const ranks = latest && latest.ranks || [];
  const rows = ranks.map((rank, index) => {
    const cells = [
      String(index), rate(rank.examples_per_s), rank.hbm_budget ? `${bytes(rank.hbm_bytes)} / ${bytes(rank.hbm_budget)}` : "–",
      `${bytes(rank.dram_bytes)} / ${bytes(rank.dram_budget)}`, rank.disk_total ? short(rank.ssd_rows) : "–",
      rank.disk_total ? `${bytes(rank.disk_read_bytes_per_s)}/s` : "–", rank.disk_total ? `${bytes(rank.disk_written_bytes_per_s)}/s` : "–",
      short(rank.ahead_late_rows), rank.damaged_partitions ? `${rank.damaged_partitions} partitions` : "none",
    ];
    const tr = document.createElement("tr");
    tr.append(...cells.map((cell, i) => element("td", i === 8 && rank.damaged_partitions ? "bad" : "", cell)));
    return tr;
  });
  byId("ranks").tBodies[0].replaceChildren(...rows);
  byId("ranks-card").hidden = !ranks.length;
  text("ranks-title", ranks.length ? `${ranks.length} ${ranks.length === 1 ? "rank" : "ranks"}` : "Ranks");
}

// ---- the stream

let state = null, received = 0, connected = false;

function draw() {
  const waiting = state.state === "waiting";
  text("name", state.name);
  document.title = `${state.name}: ${(STATES[state.state] || STATES.unknown)[0].toLowerCase()} – Thermocline`;
  text("path", state.path);
  byId("waiting").hidden = !waiting;
  for (const part of document.querySelectorAll(".live")) part.hidden = waiting;
  for (const part of [drawState, drawAlert, drawProgress, drawKeyFigures, drawTiers, drawDetails, drawRanks]) part(state);
}

function receive(next) {
  points = next.reset ? next.points : [...points, ...next.points];
  const changed = next.reset || next.points.length > 0 || state === null || state.state !== next.state;
  state = next;
  received = Date.now();
  draw();
  if (changed) drawCharts();
  document.documentElement.dataset.drawn = String(points.length);
}

function age() {
  if (!connected) {
    text("updated", "Connection lost: is `thermocline watch` still running? Trying again.");
    text("state", "Disconnected");
    byId("state").dataset.kind = "warn";
    byId("state").removeAttribute("data-live");
  } else if (state) {
    const updated = state.status ? state.now - state.status.updated + (Date.now() - received) / 1000 : null;
    text("updated", updated === null ? "" : state.state === "training" ? `Last sign of life ${duration(updated)} ago` : `Ended ${duration(updated)} ago`);
  }
}

const events = new EventSource("/events");
events.onopen = () => { connected = true; };
events.onmessage = event => { connected = true; receive(JSON.parse(event.data)); age(); };
events.onerror = () => { connected = false; age(); };
setInterval(age, 1000);
