// Completion of names and the buttons of proof trees. Pages work without it.
"use strict";

const WAIT_MS = 120;
const LIMIT = 10;
// the path below which a proxy shows the site
const ROOT = document.documentElement.dataset.root;

// A text field with a list of the names that contain its text (the combobox pattern of ARIA).
function complete(box, number) {
  const input = box.querySelector("input:not([type=hidden])");
  const chosen = box.querySelector("input[type=hidden]");
  const list = document.createElement("ul");
  const status = document.createElement("span");
  let found = [];
  let active = -1;
  let timer = 0;
  let request = null;

  // Without a script the text alone says what is asked for.
  if (chosen) chosen.value = chosen.dataset.id;
  list.className = "options";
  list.id = `options-${number}`;
  list.hidden = true;
  list.setAttribute("role", "listbox");
  list.setAttribute("aria-label", "Names");
  status.className = "hidden";
  status.setAttribute("role", "status");
  input.setAttribute("role", "combobox");
  input.setAttribute("aria-autocomplete", "list");
  input.setAttribute("aria-expanded", "false");
  input.setAttribute("aria-controls", list.id);
  box.append(list, status);

  function close() {
    clearTimeout(timer);
    if (request) request.abort();
    found = [];
    active = -1;
    list.hidden = true;
    list.replaceChildren();
    input.setAttribute("aria-expanded", "false");
    input.removeAttribute("aria-activedescendant");
  }

  function activate(index) {
    active = index;
    [...list.children].forEach((item, i) => {
      item.setAttribute("aria-selected", String(i === index));
      if (i === index) item.scrollIntoView({ block: "nearest" });
    });
    if (index < 0) input.removeAttribute("aria-activedescendant");
    else input.setAttribute("aria-activedescendant", list.children[index].id);
  }

  function choose(index) {
    const name = found[index];
    close();
    if (box.dataset.go) {
      location.assign(`${ROOT}/${name.kind}?${name.kind}_id=${name.id}`);
      return;
    }
    input.value = name.text;
    chosen.value = name.id;
  }

  function show(names) {
    found = names;
    active = -1;
    list.replaceChildren(...names.map((name, i) => {
      const item = document.createElement("li");
      const text = document.createElement("bdi");
      text.textContent = name.text;
      item.id = `${list.id}-${i}`;
      item.setAttribute("role", "option");
      item.setAttribute("aria-selected", "false");
      item.append(text);
      if (box.dataset.kind === "any") {
        const kind = document.createElement("span");
        kind.className = "tag";
        kind.textContent = name.kind;
        item.append(kind);
      }
      // before the field loses the focus
      item.addEventListener("mousedown", (event) => {
        event.preventDefault();
        choose(i);
      });
      return item;
    }));
    list.hidden = names.length === 0;
    input.setAttribute("aria-expanded", String(names.length > 0));
    status.textContent = names.length === 1 ? "1 name" : `${names.length} names`;
  }

  async function ask() {
    const query = new URLSearchParams({ q: input.value, kind: box.dataset.kind, limit: LIMIT });
    request = new AbortController();
    try {
      const response = await fetch(`${ROOT}/api/search?${query}`, { signal: request.signal });
      if (response.ok) show((await response.json()).names);
    } catch (error) {
      if (error.name !== "AbortError") close();
    }
  }

  input.addEventListener("input", () => {
    if (chosen) chosen.value = "";
    close();
    if (input.value.trim()) timer = setTimeout(ask, WAIT_MS);
  });
  input.addEventListener("blur", close);
  input.addEventListener("keydown", (event) => {
    const n = found.length;
    if (event.key === "ArrowDown" && !n && input.value.trim()) ask();
    else if (event.key === "ArrowDown" && n) activate((active + 1) % n);
    else if (event.key === "ArrowUp" && n) activate((active <= 0 ? n : active) - 1);
    else if (event.key === "Enter" && active >= 0) choose(active);
    else if (event.key === "Escape" && n) close();
    else return;
    event.preventDefault();
  });
}

document.querySelectorAll(".complete").forEach(complete);
document.querySelectorAll("[data-for-tree]").forEach((actions) => {
  actions.hidden = false;
  actions.addEventListener("click", (event) => {
    if (event.target.dataset.open === undefined) return;
    document.querySelectorAll(".tree details").forEach((part) => {
      part.open = Boolean(event.target.dataset.open);
    });
  });
});
// Empty fields do not become part of an address.
document.querySelectorAll("form").forEach((form) => {
  form.addEventListener("formdata", (event) => {
    const data = event.formData;
    for (const [name, value] of [...data]) if (!value) data.delete(name);
    // The id of a name that was chosen stands for it.
    for (const name of [...data.keys()]) if (data.has(`${name}_id`)) data.delete(name);
  });
});

// Tables of answers are sorted by the column that is clicked, and copied as CSV.
document.querySelectorAll("table.answers").forEach((table) => {
  const text = (cell) => (cell.querySelector("data")?.value ?? cell.textContent).trim();
  const cells = (row) => [...row.cells].slice(0, -1).map(text);
  const rows = () => [...table.tBodies[0].rows];

  [...table.tHead.rows[0].cells].slice(0, -1).forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.className = "sort";
    button.textContent = head.textContent;
    head.replaceChildren(button);
    button.addEventListener("click", () => {
      const isUp = head.getAttribute("aria-sort") !== "ascending";
      for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", isUp ? "ascending" : "descending");
      const compare = (a, b) => text(a.cells[column]).localeCompare(text(b.cells[column]), undefined, { numeric: true });
      table.tBodies[0].append(...rows().sort((a, b) => (isUp ? compare(a, b) : compare(b, a))));
    });
  });

  if (!navigator.clipboard) return; // browsers have one on this machine and behind https
  const copy = document.createElement("button");
  const quote = (value) => `"${value.replaceAll('"', '""')}"`;
  copy.type = "button";
  copy.textContent = "Copy as CSV";
  copy.addEventListener("click", async () => {
    const lines = [table.tHead.rows[0], ...rows()].map((row) => cells(row).map(quote).join(","));
    await navigator.clipboard.writeText(lines.join("\n"));
    copy.textContent = "Copied";
  });
  table.parentElement.after(copy);
});
