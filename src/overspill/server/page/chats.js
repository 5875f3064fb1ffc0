// Conversations in the browser's storage, which all tabs of this address share.
//
// Each is a value of its own, "<time> <JSON>", so that tabs do not overwrite each other's. The oldest
// are removed if there are too many.

const PREFIX = "overspill.chat.";
const MOST_CHATS = 50, MOST_CHARACTERS = 2_000_000;  // browsers have room for 5 million

export class Chats {
  // `storage` may be null, or refuse everything.
  constructor(storage, most = MOST_CHARACTERS) { this.storage = storage; this.most = most; }

  // The newest first.
  list() {
    return this.entries().map(({ id }) => this.read(id)).filter(chat => chat !== null);
  }

  read(id) {
    try {
      const value = this.storage.getItem(PREFIX + id), at = parseInt(value);
      return check({ ...JSON.parse(value.slice(value.indexOf(" "))), id, at });
    } catch { return null; }  // removed, or not written by this page
  }

  // Keeps `chat` and returns whether there was room for it. If another tab has changed it since, it
  // gets a new id: both are kept.
  save(chat) {
    try {
      const stored = parseInt(this.storage.getItem(PREFIX + chat.id));
      if (stored && chat.at && stored !== chat.at) chat.id = newId();
      chat.at = Math.max(Date.now(), (chat.at ?? 0) + 1);
      const { title, messages, used, model } = chat;
      const value = `${chat.at} ${JSON.stringify({ title, messages, used, model })}`;
      const others = this.entries().filter(({ id }) => id !== chat.id);
      let room = this.most - value.length - others.reduce((sum, { length }) => sum + length, 0);
      if (value.length > this.most) return false;
      for (;;) {
        if (room >= 0 && others.length < MOST_CHATS) {
          try {
            this.storage.setItem(PREFIX + chat.id, value);
            return true;
          } catch (error) {
            if (!others.length) throw error;  // the browser has less room
          }
        }
        const oldest = others.pop();
        this.remove(oldest.id);
        room += oldest.length;
      }
    } catch { return false; }
  }

  remove(id) { try { this.storage.removeItem(PREFIX + id); } catch { /* nothing is kept */ } }

  clear() { this.entries().forEach(({ id }) => this.remove(id)); }

  entries() {
    const found = [];
    try {
      for (let number = 0; number < this.storage.length; number++) {
        const name = this.storage.key(number);
        if (!name.startsWith(PREFIX)) continue;
        const value = this.storage.getItem(name);
        found.push({ id: name.slice(PREFIX.length), at: parseInt(value) || 0, length: value.length });
      }
    } catch { /* storage is switched off */ }
    return found.sort((one, other) => other.at - one.at);
  }
}

export const newId = () => Date.now().toString(36) + Math.random().toString(36).slice(2, 8);
export const newChat = () => ({ id: newId(), at: 0, title: "", messages: [], used: 0, model: null });
export const titleOf = text => text.trim().split(/\s+/).join(" ").slice(0, 80);

// The chat without anything unexpected; null if it is none.
function check({ id, at, title, messages, used, model }) {
  const whole = messages.every(({ role, content }, number) =>
    role === (number % 2 ? "assistant" : "user") && typeof content === "string");
  if (!whole || !messages.length || messages.length % 2) return null;
  return {
    id, at, title: String(title ?? ""), used: Number(used) || 0, model: typeof model === "string" ? model : null,
    messages: messages.map(({ role, content, facts }) => ({ role, content, facts: String(facts ?? "") })),
  };
}
