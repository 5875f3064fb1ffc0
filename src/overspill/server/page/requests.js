// Requests to the server, and the key that it may ask for.

import { kindOf } from "./kinds.js";

// Relative to the page, which may be below a path of another server; without a password in its address.
const HERE = location.origin + location.pathname;
const FETCH_FAILED = "The server does not answer. Check that it is running, then send the message again.";

// What is kept for this tab; storage may be switched off.
export const kept = {
  get(name) { try { return sessionStorage.getItem("overspill." + name); } catch { return null; } },
  set(name, value) { try { sessionStorage.setItem("overspill." + name, value); } catch { /* kept by the field alone */ } },
};
let key = kept.get("key") ?? "";
export const hasKey = () => key !== "";
export function setKey(value) {
  key = value;
  kept.set("key", value);
}

export class Refused extends Error {
  constructor(status, message, code = null) { super(message); this.status = status; this.code = code; }
}

export async function ask(path, options = {}) {
  const headers = { ...options.headers };
  if (key) headers.Authorization = "Bearer " + key;
  let answer;
  try {
    answer = await fetch(HERE + path, { ...options, headers, cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refused(0, FETCH_FAILED);
  }
  if (answer.ok) return answer;
  const text = await answer.text();
  let message = text.slice(0, 500) || answer.statusText, code = null;
  try {
    const told = JSON.parse(text).error;
    message = told?.message ?? message;
    code = told?.code ?? null;
  } catch { /* not JSON: shown as it is */ }
  const again = answer.headers.get("Retry-After");
  if (again && /^\d+$/.test(again)) message += ` Try again in ${again} s.`;
  throw new Refused(answer.status, `${message} (HTTP ${answer.status})`, code);
}

export async function* events(answer) {
  const decoder = new TextDecoder();
  let rest = "";
  for (const reader = answer.body.getReader();;) {
    const { value, done } = await reader.read();
    rest += decoder.decode(value, { stream: !done });
    const lines = rest.split(/\r?\n/);
    rest = done ? "" : lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data:")) continue;
      const data = line.slice(5).trim();
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
    if (done) throw new Refused(0, "The connection ended before the answer was complete.");
  }
}

// The model, its context and its kind, once they are known.
export const served = { model: null, context: null, single: false, languages: [] };
export async function findModel() {
  if (served.model !== null) return;
  const [card] = (await (await ask("v1/models")).json()).data;
  Object.assign(served, { model: String(card.id), context: card.max_model_len ?? null, ...kindOf(card) });
}
