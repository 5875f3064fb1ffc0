// Elements, and numbers as text.

export const $ = id => document.getElementById(id);

export function element(tag, { text, ...rest } = {}, ...children) {
  const made = Object.assign(document.createElement(tag), rest);
  if (text !== undefined) made.textContent = text;  // never HTML: the text may come from the model
  made.append(...children);
  return made;
}

// A button that copies what `read` returns.
export function copyButton(read) {
  const button = element("button", { type: "button", className: "quiet", text: "Copy" });
  button.addEventListener("click", async () => {
    button.textContent = await copy(read(), button) ? "Copied" : "Copying failed";
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  });
  return button;
}
async function copy(text, button) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {  // only on https and localhost
    const area = element("textarea", { value: text, className: "hidden" });
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    button.focus();
    return done;
  }
}

export const isNumber = value => typeof value === "number" && Number.isFinite(value);
export const countText = value => isNumber(value) ? value.toLocaleString("en") : "–";
export const seconds = ms => ms < 1000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(1)} s`;
export const speedText = value => value >= 100 ? Math.round(value).toLocaleString("en") : value.toFixed(1);

export function size(bytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  for (; bytes >= 1024 && unit < units.length - 1; unit++) bytes /= 1024;
  return `${bytes < 10 && unit ? bytes.toFixed(1) : Math.round(bytes)} ${units[unit]}`;
}
