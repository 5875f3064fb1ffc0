// Markdown of an answer as elements, while it arrives.
//
// Text becomes text nodes, so HTML in it is shown as it is. A line is formatted once, when it is
// complete; only the last one is formatted again with each write, and its changes are taken back
// before the next. So the time of a write does not depend on the length of the answer.

import { copyButton, element } from "./dom.js";

const LONGEST = 2000;  // characters of a line that are formatted together
const DEEPEST = 6;  // lists and quotes within each other
const PIECE = 50;  // lines of code that the browser lays out together
const MOST_MARKERS = 12;  // of emphasis that are open at once

export class Markdown {
  constructor(node) {
    this.node = node;
    this.trial = null;  // while a line is incomplete: what takes its changes back
    this.target = null;  // the element that has the end of the text
    this.blocks = new Blocks(this, node, 0);
    this.rest = "";
    this.joins = false;  // the next characters belong to the line before them
  }

  write(text) {
    this.takeBack();
    this.rest += text;
    let start = 0;
    for (;;) {
      const window = this.rest.slice(start, start + LONGEST + 1), end = window.indexOf("\n");
      if (end >= 0) {
        this.line(window.slice(0, end));
        this.joins = false;
        start += end + 1;
      } else if (window.length > LONGEST) {
        const length = cutAt(window);
        this.line(window.slice(0, length));
        this.joins = true;
        start += length;
      } else break;
    }
    this.rest = this.rest.slice(start);
    if (this.rest) this.tryRest();
  }

  finish() {
    this.takeBack();
    if (this.rest) this.line(this.rest);
    this.rest = "";
  }

  line(text) {
    if (this.joins) this.blocks.more(text); else this.blocks.line(text.replace(/\r$/, ""));
  }

  tryRest() {
    this.trial = [];
    this.line(this.rest);
    const target = this.target;
    if (!target) return;
    target.classList.add("tail");
    this.trial.push(() => target.classList.remove("tail"));
  }

  takeBack() {
    for (const undo of this.trial?.reverse() ?? []) undo();
    this.trial = null;
  }

  append(parent, ...nodes) {
    for (const node of nodes) {
      const made = typeof node === "string" ? document.createTextNode(node) : node;
      parent.append(made);
      this.trial?.push(() => made.remove());
    }
  }

  // Appends formatted text, where more of the same line may follow.
  writeInline(parent, text) {
    this.append(parent, ...inline(text, true, this.trial !== null));
    this.aim(parent);
  }

  aim(node) {
    const before = this.target;
    this.target = node;
    this.trial?.push(() => { this.target = before; });
  }
}

// Text as it is: of users, and of models that write no Markdown.
export class Plain {
  constructor(node) { this.node = node; this.last = null; }

  write(text) {
    const [first, ...others] = text.split("\n");
    if (this.last === null) this.begin(first); else if (first) this.last.append(first);
    others.forEach(line => this.begin(line));
  }

  begin(line) {
    this.last?.classList.remove("tail");
    this.last = element("span", { className: "line tail", text: line });
    this.node.append(this.last);
  }

  finish() { this.last?.classList.remove("tail"); }
}

function cutAt(text) {  // after a space, if there is one near the end; never within a character
  const space = text.lastIndexOf(" ", LONGEST - 1) + 1;
  if (space > LONGEST / 2) return space;
  const code = text.charCodeAt(LONGEST - 1);
  return code >= 0xd800 && code < 0xdc00 ? LONGEST - 1 : LONGEST;
}

// ---- blocks: paragraphs, headings, lists, quotes, code, tables
const FENCE = /^ *(`{3,}|~{3,})(.*)$/s;
const HEADING = /^ {0,3}(#{1,6})(?:\s+|$)/;
const RULE = /^ {0,3}(?:(?:- *){3,}|(?:_ *){3,}|(?:\* *){3,})$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])( +|$)/;

class Blocks {
  constructor(root, node, depth) {
    this.root = root;
    this.node = node;
    this.depth = depth;
    this.open = null;  // the block that the next line may continue; never changed, but replaced
  }

  keep() {
    const { open } = this;
    this.root.trial?.push(() => { this.open = open; });
  }

  line(text) {
    this.keep();
    if (this.open?.code) return this.addCode(text);
    text = text.replace(/^[ \t]+/, space => space.replaceAll("\t", "    "));
    if (this.open?.list && this.addToList(text)) return;
    if (this.open?.quote && QUOTE.test(text)) return this.open.quote.line(text.replace(QUOTE, ""));
    if (this.open?.table && this.addRow(text)) return;
    if (!text.trim()) { this.open = null; return; }
    if (this.depth >= DEEPEST || !this.begin(text)) this.addText(text);
  }

  // The rest of a line that was longer than LONGEST.
  more(text) {
    let blocks = this;
    while (blocks.open?.list || blocks.open?.quote) blocks = blocks.open.inner ?? blocks.open.quote;
    if (blocks.open?.code) {
      if (blocks.open.piece) this.root.append(blocks.open.piece, text);  // not of the line with the language
    } else if (this.root.target) this.root.writeInline(this.root.target, text);
  }

  // Begins a block other than a paragraph, if the line does.
  begin(text) {
    const { root } = this, fence = FENCE.exec(text), heading = HEADING.exec(text), item = ITEM.exec(text);
    if (fence && !(fence[1][0] === "`" && fence[2].includes("`"))) {
      this.beginCode(fence[1], text.search(/\S/), fence[2].trim().split(/\s/)[0]);
    } else if (heading) {
      const node = element(`h${Math.min(6, heading[1].length + 2)}`);
      root.append(this.node, node);
      root.writeInline(node, text.slice(heading[0].length).trimEnd().replace(/(^|\s)#+$/, ""));
      this.open = null;
    } else if (RULE.test(text.trimEnd())) {
      root.append(this.node, element("hr"));
      this.open = null;
    } else if (QUOTE.test(text)) {
      const node = element("blockquote"), quote = new Blocks(root, node, this.depth + 1);
      root.append(this.node, node);
      this.open = { quote };
      quote.line(text.replace(QUOTE, ""));
    } else if (item && this.mayBegin(item, text)) {
      if (root.trial && item[0].length === text.length) return true;  // it may become a rule, or bold text
      this.beginList(item, text);
    } else {
      return this.open?.paragraph ? this.beginTable(text) : false;
    }
    return true;
  }

  // As in CommonMark: within a paragraph a number other than 1, or a marker alone, begins no list.
  mayBegin(item, text) {
    return !this.open?.paragraph || (item[0].length < text.length && !(parseInt(item[2]) !== 1 && /\d/.test(item[2])));
  }

  addText(text) {
    const { root } = this, line = element("span", { className: "line" });
    let paragraph = this.open?.paragraph;
    if (!paragraph) root.append(this.node, paragraph = element("p"));
    root.append(paragraph, line);
    root.writeInline(line, text.trimEnd());
    this.open = { paragraph, last: line, text };
  }

  // ---- code
  beginCode(fence, indent, language) {
    const code = element("code"), frame = element("div", { className: "code" },
      element("div", { className: "code-head" }, element("span", { text: language }), copyButton(() => codeText(code))),
      element("pre", { tabIndex: 0 }, code));
    this.root.append(this.node, frame);
    this.root.aim(code);
    this.open = { code, fence, indent, piece: null, count: 0 };
  }

  addCode(text) {
    const { code, fence, indent, piece, count } = this.open, { root } = this, closing = text.trim();
    if (closing.length >= fence.length && closing === fence[0].repeat(closing.length)) { this.open = null; return; }
    const margin = text.length - text.trimStart().length;
    const added = text.slice(Math.min(indent, margin)), begins = count % PIECE === 0;
    const last = begins ? element("span", { className: "piece" }) : piece;
    if (begins) root.append(code, last);
    root.append(last, begins ? added : "\n" + added);
    root.aim(last);
    this.open = { ...this.open, piece: last, count: count + 1 };
  }

  // ---- lists
  beginList(item, text) {
    const ordered = /\d/.test(item[2]), node = element(ordered ? "ol" : "ul");
    if (ordered && parseInt(item[2]) !== 1) node.start = parseInt(item[2]);
    this.root.append(this.node, node);
    this.open = { list: node, ordered };
    this.addItem(item, text);
  }

  addItem(item, text) {
    const node = element("li"), inner = new Blocks(this.root, node, this.depth + 1);
    const space = item[3].length > 4 ? 1 : Math.max(1, item[3].length);
    const indent = item[1].length, content = indent + item[2].length + space;
    this.root.append(this.open.list, node);
    this.open = { ...this.open, inner, indent, content };
    this.root.aim(node);
    if (text.length > item[0].length) inner.line(text.slice(content));
  }

  // Two spaces are enough to belong to an item: many models write no more after "1. ".
  addToList(text) {
    const { inner, indent, content, ordered } = this.open;
    if (!text.trim()) { inner.line(""); return true; }
    const margin = text.search(/\S/), item = ITEM.exec(text);
    if (margin >= indent + 2) {
      const begins = Math.min(margin, content);
      this.open = { ...this.open, content: begins };
      inner.line(text.slice(begins));
      return true;
    }
    if (!item || /\d/.test(item[2]) !== ordered || RULE.test(text.trimEnd())) {
      this.open = null;
      return false;
    }
    this.addItem(item, text);
    return true;
  }

  // ---- tables
  beginTable(text) {
    const { last, paragraph, text: above } = this.open;
    if (!above.includes("|") || !text.includes("|") && !text.includes("-")) return false;
    const marks = cells(text), head = cells(above);
    if (marks.length !== head.length || !marks.every(mark => /^:?-+:?$/.test(mark))) return false;
    if (this.root.trial) return true;  // shown when the line is complete
    last.remove();
    if (!paragraph.firstChild) paragraph.remove();
    const align = marks.map(mark => mark.endsWith(":") ? mark.startsWith(":") ? "center" : "right" : "");
    const body = element("tbody"), row = element("tr");
    head.forEach((cell, column) => row.append(element("th", { className: align[column] }, ...inline(cell))));
    this.root.append(this.node, element("div", { className: "table", tabIndex: 0 },
      element("table", {}, element("thead", {}, row), body)));
    this.open = { table: body, align };
    return true;
  }

  addRow(text) {
    const { table, align } = this.open;
    if (!text.includes("|")) { this.open = null; return false; }
    const given = cells(text), row = element("tr");
    this.root.append(table, row);
    align.forEach((className, column) => {
      const cell = element("td", { className });
      row.append(cell);
      this.root.writeInline(cell, given[column] ?? "");
    });
    return true;
  }
}

const codeText = code => [...code.children].map(piece => piece.textContent).join("\n");

function cells(row) {
  const found = [];
  let cell = "";
  row = row.trim().replace(/^\|/, "");
  for (let at = 0; at < row.length; at++) {
    if (row[at] === "\\" && row[at + 1] === "|") { cell += "|"; at++; }
    else if (row[at] === "|") { found.push(cell.trim()); cell = ""; }
    else cell += row[at];
  }
  if (cell.trim() || !found.length) found.push(cell.trim());
  return found;
}

// ---- within a line: code, emphasis, links
const SPACE = /\s/, MARK = /[\p{P}\p{S}]/u, ESCAPABLE = /[!-/:-@[-`{-~]/, WORD = /[\p{L}\p{N}_]/u;
const BARE = /https?:\/\/[^\s<>"`|\\]+/iy, ANGLE = /<(https?:\/\/[^\s<>]+)>/iy;
const TAGS = { "*1": "em", "_1": "em", "*2": "strong", "_2": "strong", "~2": "del" };

// `trial`: the end of the text is not there yet, so open bold text and code are shown as such.
export function inline(text, links = true, trial = false) {
  const stack = [{ nodes: [] }];
  let plain = "", at = 0;
  const add = node => {
    const { nodes } = stack.at(-1);
    if (plain) nodes.push(plain);
    plain = "";
    if (node) nodes.push(node);
  };
  const unclosed = new Set();  // lengths of runs of backticks that no other run closes
  const readers = {
    "\\": () => {
      if (!ESCAPABLE.test(text[at + 1] ?? "")) return false;
      plain += text[at + 1];
      at += 2;
      return true;
    },
    "`": () => {
      const run = runAt(text, at), from = at + run;
      let end = unclosed.has(run) ? -1 : closing(text, from, run);
      if (end < 0) {
        unclosed.add(run);
        if (!trial || run > 2) { plain += "`".repeat(run); at = from; return true; }
        end = text.length;
      }
      const code = text.slice(from, end);
      add(element("code", { text: /^ .*\S.* $/.test(code) ? code.slice(1, -1) : code }));
      at = end + run;
      return true;
    },
    "[": () => links && readLink(at),
    "!": () => links && text[at + 1] === "[" && readLink(at + 1),
    "<": () => links && readAddress(ANGLE),
    "h": () => links && !WORD.test(text[at - 1] ?? " ") && readAddress(BARE),
    "H": () => readers.h(),
    "*": () => readEmphasis("*"),
    "_": () => readEmphasis("_"),
    "~": () => readEmphasis("~"),
  };
  const readLink = from => {
    const link = linkAt(text, from);
    if (!link) return false;
    add(anchor(link.address, link.label ? inline(link.label, false) : [link.address.href]));
    at = link.end;
    return true;
  };
  const readAddress = pattern => {
    pattern.lastIndex = at;
    const found = pattern.exec(text);
    if (!found) return false;
    const written = found[1] ?? withoutEnd(found[0]), address = safe(written);
    if (!address) return false;
    add(anchor(address, [written]));
    at += found[1] ? found[0].length : written.length;
    return true;
  };
  const readEmphasis = mark => {
    const run = runAt(text, at), before = text[at - 1] ?? " ", after = text[at + run] ?? " ";
    at += run;
    if (run > 3 || mark === "~" && run !== 2) { plain += mark.repeat(run); return true; }
    const left = !SPACE.test(after) && (!MARK.test(after) || SPACE.test(before) || MARK.test(before));
    const right = !SPACE.test(before) && (!MARK.test(before) || SPACE.test(after) || MARK.test(after));
    const opens = left && (mark !== "_" || !right || MARK.test(before));
    const closes = right && (mark !== "_" || !left || MARK.test(after));
    let rest = run;
    while (closes && rest > 0) {
      const index = stack.findLastIndex(open => open.mark === mark && open.size <= rest);
      if (index < 1) break;
      add();
      while (stack.length > index + 1) unwrap(stack);
      rest -= stack[index].size;
      wrap(stack);
    }
    if (rest && opens && stack.length < MOST_MARKERS) {
      add();
      for (const size of rest === 3 ? [1, 2] : [rest]) stack.push({ mark, size, nodes: [] });
    } else plain += mark.repeat(rest);
    return true;
  };
  while (at < text.length) {
    if (Object.hasOwn(readers, text[at]) && readers[text[at]]()) continue;
    plain += text[at++];
  }
  add();
  while (stack.length > 1) if (trial && stack.at(-1).size === 2) wrap(stack); else unwrap(stack);
  return stack[0].nodes;
}

function wrap(stack) {
  const { mark, size, nodes } = stack.pop();
  stack.at(-1).nodes.push(element(TAGS[mark + size], {}, ...nodes));
}
function unwrap(stack) {  // it is not closed: the marker is text
  const { mark, size, nodes } = stack.pop();
  stack.at(-1).nodes.push(mark.repeat(size), ...nodes);
}
function runAt(text, at) {
  let end = at + 1;
  while (text[end] === text[at]) end++;
  return end - at;
}
function closing(text, from, run) {
  for (let at = text.indexOf("`", from); at >= 0; at = text.indexOf("`", at)) {
    const found = runAt(text, at);
    if (found === run) return at;
    at += found;
  }
  return -1;
}

// ---- links: only absolute ones to the web
function safe(written) {
  if (!/^https?:\/\//i.test(written)) return null;
  try {
    const address = new URL(written);
    return /^https?:$/.test(address.protocol) ? address : null;
  } catch { return null; }
}
function anchor({ href }, nodes) {
  return element("a", { href, title: href, target: "_blank", rel: "noopener noreferrer" }, ...nodes);
}
function linkAt(text, from) {  // [label](address "title")
  const end = matching(text, from, "[", "]");
  if (end < 0 || text[end + 1] !== "(") return null;
  const last = matching(text, end + 1, "(", ")");
  if (last < 0) return null;
  const address = safe(text.slice(end + 2, last).trim().split(/\s/)[0].replace(/^<(.*)>$/, "$1"));
  return address && { label: text.slice(from + 1, end), address, end: last + 1 };
}
function matching(text, from, opens, closes) {
  let depth = 0;
  for (let at = from; at < text.length; at++) {
    if (text[at] === "\\") at++;
    else if (text[at] === opens) depth++;
    else if (text[at] === closes && --depth === 0) return at;
  }
  return -1;
}
function withoutEnd(address) {  // what follows an address in a sentence is not a part of it
  for (;;) {
    const last = address.at(-1);
    const bracket = last === ")" && address.split(")").length > address.split("(").length;
    if (!bracket && !".,;:!?*_~'".includes(last)) return address;
    address = address.slice(0, -1);
  }
}
