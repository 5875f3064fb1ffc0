// The conversation: what is sent, and how answers are shown.

import { Chats, newChat, titleOf } from "./chats.js";
import { $, copyButton, countText, element, seconds, speedText } from "./dom.js";
import { requestOf, textOf, totalOf } from "./kinds.js";
import { Markdown, Plain } from "./markdown.js";
import { Refused, ask, events, findModel, hasKey, kept, served } from "./requests.js";

const NEARLY_FULL = 0.9;
const UNFINISHED = new Set(["stopped", "incomplete"]);  // by the user, by an error

function localChats() {
  try { return new Chats(localStorage); } catch { return new Chats(null); }
}
export const chats = localChats();
let chat = newChat();
let running = null;  // ends the answer that is being made
let partial = null;  // the same answer with the text so far, for a page that is left

export const isRunning = () => running !== null;
export const currentId = () => chat.id;

// ---- messages on the page
function atEnd(change) {  // scrolls along only if the end is visible
  const log = $("log"), stay = log.scrollHeight - log.scrollTop - log.clientHeight < 60;
  change();
  if (stay) log.scrollTop = log.scrollHeight;
}
function bodyFor(role) {
  const formatted = role === "assistant" && !$("plain").checked;
  return new (formatted ? Markdown : Plain)(element("div", { className: `body ${formatted ? "markdown" : "text"}` }));
}
function add(role, text = "") {
  const body = bodyFor(role), meta = element("div", { className: "meta" });
  const node = element("article", { className: role });
  node.setAttribute("aria-label", role === "user" ? "You" : "Answer");
  node.append(body.node, meta);
  if (text) { body.write(text); body.finish(); }
  $("empty").hidden = true;
  atEnd(() => $("messages").append(node));
  return { node, body, meta };
}
function addFacts(meta, text, facts) {
  meta.append(copyButton(() => text), element("span", { text: facts }));
}
function clearPage() {
  for (const node of [...$("messages").children]) if (node !== $("empty")) node.remove();
  $("empty").hidden = false;
}
function drawChat() {
  clearPage();
  for (const { role, content, facts } of chat.messages) {
    const { meta } = add(role, content);
    if (role === "assistant") addFacts(meta, content, facts);
  }
  $("log").scrollTop = $("log").scrollHeight;
  showContext();
}
export function drawAgain() { if (!running) drawChat(); }  // a running answer keeps its form

// `then`, if given, is the text of a button and what it does.
function showBox(className, text, then) {
  const box = element("div", { className, text });
  box.setAttribute("role", className === "error" ? "alert" : "status");
  if (then) {
    const button = element("button", { type: "button", text: then[0] });
    button.addEventListener("click", then[1]);
    box.append(button);
  }
  atEnd(() => $("messages").append(box));
}
export function removeBoxes() { for (const box of document.querySelectorAll(".error, .notice")) box.remove(); }

function showError(error) {
  if (error.code === "context_length_exceeded" && chat.messages.length > 1 && !served.single) {
    showBox("notice", `This conversation no longer fits into the context of ${countText(served.context)} tokens, ` +
      "so the message was not sent.", ["New conversation with this message", () => newConversation(true)]);
  } else showBox("error", error.message);
  if (error.status === 401) askForKey();
}
export function askForKey() {
  if (!$("key-form").hidden) return;
  $("key-hint").textContent = hasKey() ? "The server does not accept this key." : "This server needs a key. It is kept until this tab is closed.";
  $("key-form").hidden = false;
  $("key").focus();
}
function showContext() {
  const share = chat.used / served.context, known = chat.used > 0 && served.context > 0;
  $("context").hidden = !known;
  if (!known) return;
  $("context").textContent = `Context ${countText(chat.used)} of ${countText(served.context)}`;
  $("context").classList.toggle("full", share >= NEARLY_FULL);
  $("context").title = share >= NEARLY_FULL
    ? "The context is nearly full: begin a new conversation soon." : "Tokens of this conversation, of those that fit.";
}

// ---- sending
function number(id, least, most) {
  const field = $(id), value = field.valueAsNumber;
  if (!field.checkValidity() || !(value >= least && value <= most)) {
    showSettings(true);
    field.focus();
    throw new Refused(0, `${field.labels[0].textContent} must be a number from ${least}${most === Infinity ? "" : " to " + most}.`);
  }
  return value;
}
function request() {
  const known = served.languages.length > 0;  // else the fields are not shown
  const languages = known ? { src_lang: $("src-lang").value.trim(), tgt_lang: $("tgt-lang").value.trim() } : {};
  const { path, fields } = requestOf(served.single, chat.messages, $("system").value.trim(), languages);
  const body = {
    model: served.model, stream: true, stream_options: { include_usage: true },
    temperature: number("temperature", 0, 2), max_tokens: number("max-tokens", 1, Infinity), ...fields,
  };
  return { path, body: JSON.stringify(body) };
}
export async function send() {
  const text = $("prompt").value;
  if (running || !text.trim()) return;
  removeBoxes();
  const asked = { role: "user", content: text }, control = new AbortController();
  let question = null, answer = null;
  chat.messages.push(asked);
  setRunning(control);
  try {
    await findModel();
    setModel();
    const asking = request();
    question = add("user", text);
    answer = add("assistant");
    setPrompt("");
    await receive(asking, answer, control);
  } catch (error) {
    if (running === control) showError(error);  // not of a conversation that was left
  }
  if (running !== control) return;
  setRunning(null);
  if (chat.messages.at(-1) === asked) {  // nothing was answered: the message can be sent again
    chat.messages.pop();
    question?.node.remove();
    answer?.node.remove();
    if (!$("prompt").value) setPrompt(text);
    $("empty").hidden = $("messages").children.length > 1;
  }
}
async function receive({ path, body }, { node, body: shown, meta }, control) {
  const began = performance.now(), parts = [];
  let waiting = "", first = null, usage = null, reason = null, drawn = 0, failure = null;
  const draw = () => {
    drawn = 0;
    atEnd(() => shown.write(waiting));
    waiting = "";
  };
  partial = () => parts.join("");
  node.setAttribute("aria-busy", "true");
  try {
    const headers = { "Content-Type": "application/json" };
    const answer = await ask(path, { method: "POST", body, headers, signal: control.signal });
    for await (const event of events(answer)) {
      if (event.error) throw new Refused(0, event.error.message ?? "The server reports an error.");
      const choice = event.choices?.[0];
      const text = textOf(choice);
      if (text) {
        first ??= performance.now();
        parts.push(text);
        waiting += text;
        drawn ||= requestAnimationFrame(draw);
      }
      reason = choice?.finish_reason ?? reason;
      usage = event.usage ?? usage;
    }
  } catch (error) {
    if (error.name !== "AbortError") failure = error;
    reason = failure ? "incomplete" : "stopped";
  }
  if (drawn) cancelAnimationFrame(drawn);
  draw();
  atEnd(() => shown.finish());
  node.removeAttribute("aria-busy");
  if (running !== control) return;  // a new conversation was begun
  const text = parts.join("");
  if (text || (reason && !UNFINISHED.has(reason))) finish(meta, { text, usage, reason, began, first });
  if (failure) throw failure;
}
function finish(meta, answer) {
  const { text, usage, reason } = answer, total = totalOf(served.single, usage);
  const full = served.context > 0 && total >= served.context;
  const facts = factsOf(answer, full);
  chat.messages.push({ role: "assistant", content: text, facts });
  atEnd(() => addFacts(meta, text, facts));
  if (total) chat.used = total;
  showContext();
  if (reason === "length" && full) {
    showBox("notice", `The context of ${countText(served.context)} tokens is full, so the answer was cut.`,
      ["New conversation", () => newConversation()]);
  }
  keep();
  $("announce").textContent = reason === "stopped" ? "Stopped." : full ? "The context is full." : "Answer complete.";
}
function factsOf({ text, usage, reason, began, first }, full) {
  const ended = performance.now(), tokens = usage?.completion_tokens ?? null, facts = [];
  if (!text) facts.push("empty answer");
  if (reason === "length") facts.push(full ? "cut: the context is full" : "cut at max tokens");
  if (UNFINISHED.has(reason)) facts.push(reason);
  if (tokens !== null) facts.push(tokens === 1 ? "1 token" : `${countText(tokens)} tokens`);
  if (first !== null) facts.push(`first after ${seconds(first - began)}`);
  if (tokens > 1 && first !== null && ended > first) facts.push(`${speedText(1000 * (tokens - 1) / (ended - first))} tokens/s`);
  return facts.join(" · ");
}

// ---- what is kept
function keep() {
  chat.title ||= titleOf(chat.messages[0].content);
  chat.model = served.model;
  $("not-kept").hidden = chats.save(chat);
  kept.set("chat", chat.id);
}
// The page is left: what there is of an answer is kept too.
export function keepPartial() {
  const text = running && partial?.();
  if (!text || chat.messages.length % 2 === 0) return;
  const messages = [...chat.messages, { role: "assistant", content: text, facts: "incomplete" }];
  const copy = { ...chat, title: chat.title || titleOf(messages[0].content), messages, model: served.model };
  chats.save(copy);
  Object.assign(chat, { id: copy.id, at: copy.at });
  kept.set("chat", chat.id);
}
export function openChat(id) {
  const found = chats.read(id);
  if (!found) return false;
  leave();
  chat = found;
  kept.set("chat", id);
  drawChat();
  return true;
}
export const openLast = () => openChat(kept.get("chat") ?? "");

export function setModel() {
  $("model").textContent = $("model").title = $("title").textContent = served.model;
  const { single, languages } = served;
  $("system-field").hidden = single;
  $("single").hidden = !single;
  for (const id of ["src-field", "tgt-field"]) $(id).hidden = languages.length === 0;
  if ($("languages").children.length !== languages.length) {
    $("languages").replaceChildren(...languages.map(value => element("option", { value })));
  }
  showContext();
}

// ---- controls
function setRunning(control) {
  running = control;
  if (!control) partial = null;
  $("stop").hidden = !control;
  $("send").hidden = Boolean(control);
  if (control) $("announce").textContent = "Waiting for the answer.";
}
export function stop() { running?.abort(); }
export function setPrompt(text) { $("prompt").value = text; fit(); }
export function fit() {
  const area = $("prompt");
  area.style.height = "auto";
  area.style.height = area.scrollHeight + "px";
}
function leave() {  // an answer that is being made is kept as far as it is
  keepPartial();
  stop();
  setRunning(null);
}
export function newConversation(keepsPrompt = false) {
  leave();
  chat = newChat();
  kept.set("chat", "");
  clearPage();
  showContext();
  if (!keepsPrompt) setPrompt("");
  $("prompt").focus();
}
export function showSettings(shown) {
  $("settings").hidden = !shown;
  $("show-settings").setAttribute("aria-expanded", shown);
}
