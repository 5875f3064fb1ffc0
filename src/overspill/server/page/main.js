// The controls of the page.

import { chats, currentId, drawAgain, fit, isRunning, keepPartial, newConversation, openChat, openLast,
  removeBoxes, send, showSettings, stop } from "./conversation.js";
import { $, element } from "./dom.js";
import { drawChart, poll, showAgain } from "./figures.js";
import { kept, setKey } from "./requests.js";

function showStats(shown) {
  document.body.classList.toggle("stats", shown);
  $("show-stats").setAttribute("aria-expanded", shown);
  $("show-stats").textContent = shown ? "Chat" : "Server";
  showAgain();
}

// ---- the list of chats
function chatRow({ id, title, at, model }) {
  const open = element("button", { type: "button", className: "chat" },
    element("span", { text: title }), element("small", { text: `${new Date(at).toLocaleString()}${model ? ` · ${model}` : ""}` }));
  const remove = element("button", { type: "button", className: "quiet", text: "Delete" });
  remove.setAttribute("aria-label", `Delete ${title}`);
  if (id === currentId()) open.setAttribute("aria-current", "true");
  open.addEventListener("click", () => {
    openChat(id);
    showStats(false);
    $("chats").hidePopover();
    $("prompt").focus();
  });
  remove.addEventListener("click", () => {
    chats.remove(id);
    if (id === currentId()) newConversation(true);
    listChats();
    ($("chat-list").querySelector("button") ?? $("show-chats")).focus();
  });
  return element("li", {}, open, remove);
}
function listChats() {
  const rows = chats.list().map(chatRow);
  $("chat-list").replaceChildren(...rows);
  $("no-chats").hidden = rows.length > 0;
  $("delete-chats").hidden = rows.length === 0;
}
let listed = false;
$("chats").addEventListener("beforetoggle", event => {
  listed = event.newState === "open";
  if (listed) listChats();
});
$("delete-chats").addEventListener("click", () => {
  if (!confirm("Delete all chats that this browser has kept?")) return;
  chats.clear();
  newConversation(true);
  $("chats").hidePopover();
});

// ---- writing
$("form").addEventListener("submit", event => { event.preventDefault(); send(); });
$("prompt").addEventListener("input", fit);
$("prompt").addEventListener("keydown", event => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
});
document.addEventListener("keydown", event => {
  if (event.key !== "Escape" || !isRunning() || listed) return;  // it closes the list of chats
  stop();
  $("prompt").focus();
});
$("stop").addEventListener("click", () => { stop(); $("prompt").focus(); });
$("new").addEventListener("click", () => { newConversation(); showStats(false); });
$("show-stats").addEventListener("click", () => showStats(!document.body.classList.contains("stats")));

// ---- settings
$("show-settings").addEventListener("click", () => {
  showSettings($("settings").hidden);
  if (!$("settings").hidden) [...$("settings").querySelectorAll("textarea, input")].find(field => field.offsetParent).focus();
});
for (const id of ["system", "src-lang", "tgt-lang", "temperature", "max-tokens"]) {
  $(id).value = kept.get(id) ?? $(id).value;
  $(id).addEventListener("change", () => kept.set(id, $(id).value));
}
const showPlain = () => document.body.classList.toggle("fixed", $("plain").checked);
$("plain").checked = kept.get("plain") === "true";
$("plain").addEventListener("change", () => {
  kept.set("plain", $("plain").checked);
  showPlain();
  drawAgain();
});
showPlain();
$("key-form").addEventListener("submit", event => {
  event.preventDefault();
  setKey($("key").value.trim());
  $("key-form").hidden = true;
  removeBoxes();
  $("prompt").focus();
  poll();
});

document.addEventListener("visibilitychange", poll);
addEventListener("pagehide", keepPartial);
addEventListener("resize", drawChart);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", showAgain);
openLast();
$("prompt").focus();
poll();
