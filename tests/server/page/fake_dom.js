// As much of a browser's document as the modules of the page need, and elements as text for asserts.

class Node {
  parent = null;
  remove() {
    if (!this.parent) return;
    this.parent.children.splice(this.parent.children.indexOf(this), 1);
    this.parent = null;
  }
}

class Text extends Node {
  constructor(text) { super(); this.text = text; }
  get textContent() { return this.text; }
  markup() { return escape(this.text); }
}

class Element extends Node {
  constructor(tag) { super(); this.tag = tag; this.children = []; this.className = ""; }

  append(...nodes) {
    for (const each of nodes) {
      const node = typeof each === "string" ? new Text(each) : each;
      if (!(node instanceof Node)) throw new TypeError(`${each} is no node`);
      node.remove();
      node.parent = this;
      this.children.push(node);
      document.appended++;
    }
  }
  get firstChild() { return this.children[0] ?? null; }
  get textContent() { return this.children.map(child => child.textContent).join(""); }
  set textContent(text) { this.children = []; if (text) this.append(text); }
  get classList() {
    const names = new Set(this.className.split(" ").filter(Boolean)), set = () => { this.className = [...names].join(" "); };
    return { add: name => { names.add(name); set(); }, remove: name => { names.delete(name); set(); } };
  }
  addEventListener() {}

  markup() {
    const given = Object.entries(this).filter(([name, value]) => !["tag", "children", "parent"].includes(name) && value !== "");
    const words = given.map(([name, value]) => ` ${name}="${escape(String(value))}"`).join("");
    // neighbours among text nodes are one text
    return `<${this.tag}${words}>${this.children.map(child => child.markup()).join("")}</${this.tag}>`;
  }
}

const escape = text => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;").replaceAll('"', "&quot;");

export const document = {
  appended: 0,  // nodes that were ever appended
  createElement: tag => new Element(tag),
  createTextNode: text => new Text(text),
};
globalThis.document = document;

// What localStorage is; `most` is its room in characters.
export class Storage {
  constructor(most = Infinity) { this.most = most; this.items = new Map(); }
  get length() { return this.items.size; }
  key(number) { return [...this.items.keys()][number] ?? null; }
  getItem(key) { return this.items.get(key) ?? null; }
  removeItem(key) { this.items.delete(key); }
  setItem(key, value) {
    const others = [...this.items].filter(([name]) => name !== key).reduce((sum, [, text]) => sum + text.length, 0);
    if (others + value.length > this.most) throw new DOMException("full", "QuotaExceededError");
    this.items.set(key, String(value));
  }
}
