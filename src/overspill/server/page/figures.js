// The live figures of the server.

import { askForKey, setModel } from "./conversation.js";
import { $, countText, element, isNumber, size, speedText } from "./dom.js";
import { ask, findModel } from "./requests.js";

const EVERY = 1000, SHOWN = 120, MANY_LAYERS = 96;
const LATE = 4000;  // ms after which figures that do not come are not current
const GIVE_UP = 15_000;

const speeds = [];
let last = null, timer = 0, polling = false;
let received = null;  // when the figures came
let asked = 0;

function bar(name, value, share) {
  const row = element("div", { className: "bar" },
    element("div", {}, element("span", { text: name }), element("span", { text: value })));
  if (share === null) return row;
  const fill = element("div");
  fill.style.width = `${100 * Math.min(1, Math.max(0, share))}%`;
  row.append(element("div", { className: "track" }, fill));
  return row;
}

function showTiers({ bytes_per_tier: bytes, budget_per_tier: budgets, gpu_reserved: reserved, device }) {
  const names = { gpu: String(device).startsWith("cpu") ? "Compute device (CPU)" : "GPU", host: "Host memory", disk: "Disk" };
  const known = Object.entries(bytes ?? {}).filter(([, value]) => isNumber(value));
  $("tiers").replaceChildren(...known.flatMap(([tier, experts]) => {
    const used = tier === "gpu" && isNumber(reserved) ? reserved : experts, budget = budgets?.[tier];
    const name = names[tier] ?? tier;
    if (!isNumber(budget) || budget <= 0) return [bar(name, used || tier !== "disk" ? size(used) : "not used", null)];
    const row = bar(name, `${size(used)} of ${size(budget)}`, used / budget);
    return used === experts ? [row] : [row, element("p", { className: "hint", text: `of it ${size(experts)} for experts` })];
  }));
  if (!known.length) $("tiers").append(element("p", { className: "none", text: "Not available" }));
}
function showHeat(rates) {
  const known = Array.isArray(rates) && rates.length > 0 && rates.some(isNumber);
  $("heat").hidden = $("scale").hidden = !known;
  $("no-heat").hidden = known;
  if (!known) return;
  const style = getComputedStyle(document.documentElement);
  const [from, to] = ["--heat-0", "--heat-1"].map(name => Number(style.getPropertyValue(name)));
  $("heat").replaceChildren(...rates.map((rate, layer) => {
    const percent = isNumber(rate) ? Math.round(100 * rate) : null;
    const cell = element("div", { title: `Layer ${layer}: ${percent ?? "–"}%`, text: rates.length > MANY_LAYERS ? "" : percent ?? "–" });
    if (percent === null) return cell;
    const light = from + (to - from) * rate;
    cell.style.background = `oklch(${light} ${0.05 + 0.05 * rate} 225)`;
    cell.style.color = light > 0.575 ? "#0c1a20" : "#fff";
    return cell;
  }));
  const values = rates.filter(isNumber), percent = value => `${Math.round(100 * value)}%`;
  const mean = values.reduce((sum, value) => sum + value, 0) / values.length;
  $("heat").setAttribute("aria-label", `Hit rate of ${rates.length} layers: mean ${percent(mean)}, ` +
    `lowest ${percent(Math.min(...values))} in layer ${rates.indexOf(Math.min(...values))}`);
}
export function drawChart() {
  const canvas = $("chart"), width = canvas.clientWidth, height = canvas.clientHeight;
  if (!width) return;  // not shown
  const ratio = devicePixelRatio || 1, pen = canvas.getContext("2d");
  canvas.width = width * ratio;
  canvas.height = height * ratio;
  pen.scale(ratio, ratio);
  const style = getComputedStyle(document.documentElement), colour = name => style.getPropertyValue(name);
  const known = speeds.filter(isNumber), most = scaleOf(Math.max(1, ...known)), base = height - 4, top = 16;
  const x = index => width - 1 - (speeds.length - 1 - index) * (width - 2) / (SHOWN - 1);
  const y = value => base - (base - top) * value / most;
  pen.strokeStyle = colour("--line");
  pen.beginPath();
  for (const line of [base, top]) { pen.moveTo(0, line + 0.5); pen.lineTo(width, line + 0.5); }
  pen.stroke();
  pen.fillStyle = colour("--soft");
  pen.font = "12px system-ui, sans-serif";
  pen.fillText(most.toLocaleString("en"), 0, 11);
  pen.textAlign = "right";
  pen.fillText("last 2 minutes", width, 11);
  pen.strokeStyle = colour("--accent");
  pen.lineWidth = 2;
  pen.lineJoin = "round";
  pen.beginPath();
  let open = false;
  speeds.forEach((value, index) => {
    if (!isNumber(value)) { open = false; return; }
    if (open) pen.lineTo(x(index), y(value)); else pen.moveTo(x(index), y(value));
    open = true;
  });
  pen.stroke();
}
function scaleOf(value) {  // 1, 2 or 5 times a power of ten
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map(step => step * power).find(step => step >= value);
}
function show(stats) {
  last = stats;
  $("speed").textContent = isNumber(stats.tokens_per_second) ? speedText(stats.tokens_per_second) : "–";
  $("running").textContent = countText(stats.running);
  $("waiting").textContent = countText(stats.waiting);
  const all = stats.kv_blocks, free = stats.kv_blocks_free;
  $("blocks").replaceChildren(...isNumber(all) && isNumber(free) && all > 0
    ? [bar("KV cache", `${countText(all - free)} of ${countText(all)} blocks`, (all - free) / all)] : []);
  showTiers(stats);
  showHeat(stats.hit_rate_per_layer);
  drawChart();
}
export function showAgain() { if (last) show(last); }  // the page has other sizes or colours

// ---- asking
function setState(state, text) {
  $("state").dataset.state = state;
  $("state").textContent = text;
}
function showAge(reason) {  // null: the figures are current
  const age = received === null ? "" : ` Figures of ${Math.round((performance.now() - received) / 1000)} s ago.`;
  if (reason !== null && $("age").hidden) $("announce").textContent = reason;  // once, not with each second
  $("stats").classList.toggle("stale", reason !== null && received !== null);
  $("age").hidden = reason === null;
  if (reason !== null) $("age").textContent = reason + age;
}
let reason = null;
setInterval(() => {
  if (document.hidden) return;
  if (polling && performance.now() - asked > LATE) {
    reason = "The server does not answer.";
    setState("bad", "no answer");
  }
  if (reason) showAge(reason);
}, 1000);

export async function poll() {
  clearTimeout(timer);
  if (polling || document.hidden) return;
  polling = true;
  asked = performance.now();
  try {
    const stats = await (await ask("stats", { signal: AbortSignal.timeout(GIVE_UP) })).json();
    speeds.push(stats.tokens_per_second);
    received = performance.now();
    showAge(reason = null);
    setState(stats.draining ? "bad" : "ready", stats.draining ? "stopping" : stats.running ? `${stats.running} running` : "ready");
    show(stats);
    await findModel();
    setModel();
  } catch (error) {
    speeds.push(null);
    reason = error.status === 401 ? "The server needs a key." : error.status ? "The server refuses to give figures." : "The server does not answer.";
    showAge(reason);
    drawChart();
    setState("bad", error.status === 401 ? "key needed" : error.status ? `HTTP ${error.status}` : "not reachable");
    if (error.status === 401) askForKey();
  } finally {
    polling = false;
  }
  if (speeds.length > SHOWN) speeds.shift();
  if ($("key-form").hidden) timer = setTimeout(poll, EVERY);  // else continues with the key
}
