// The table of all runs, with search, sorting and check boxes for comparing.
import {el, moment, number, whole} from "./dom.js";

const COLUMNS = [
  {key: "name", label: "name"},
  {key: "status", label: "status"},
  {key: "model", label: "model"},
  {key: "started", label: "started", show: moment},
  {key: "steps", label: "steps", show: whole, number: true},
  {key: "loss", label: "loss", show: (value) => number(value), number: true},
  {key: "samples_per_s", label: "samples/s", show: (value) => number(value), number: true},
  {key: "verdict", label: "verdict", show: (value) => (value ?? "").replaceAll("_", " ")},
];
export const MOST_COMPARED = 8;

// Kept while the page is open, whichever part is shown.
const state = {search: "", order: "started", down: true, ticked: new Set()};

const shown = (column, row) => (column.show ? column.show(row[column.key]) : row[column.key] ?? "");

export class Table {
  constructor(parent) {
    this.rows = [];
    this.drawn = new Map();
    this.search = el("input", {type: "search", placeholder: "Search: name, status, model, verdict", "aria-label": "search",
      value: state.search, oninput: () => { state.search = this.search.value; this.draw(); }});
    this.compare = el("button", {type: "button", id: "compare", onclick: () => {
      location.hash = `#/compare/${[...state.ticked].join(",")}`;
    }});
    this.count = el("span", {class: "soft"}, "Reading the runs.");
    this.head = el("tr");
    this.body = el("tbody");
    parent.replaceChildren(
      el("div", {class: "tools"}, this.search, this.compare, this.count),
      el("div", {class: "wide"}, el("table", {id: "runs"}, el("thead", {}, this.head), this.body)));
    this.drawHeader();
    this.ticks();
  }

  update(data) {
    this.rows = data.runs;
    const there = new Set(this.rows.map((row) => row.id));
    for (const id of state.ticked) if (!there.has(id)) state.ticked.delete(id);
    this.draw();
  }

  drawHeader() {
    this.head.replaceChildren(el("th", {class: "tick"}), ...COLUMNS.map((column) => el("th", {
      class: `${column.key}${column.number ? " number" : ""}`,
      "aria-sort": state.order !== column.key ? null : state.down ? "descending" : "ascending",
    }, el("button", {type: "button", onclick: () => this.order(column.key)},
      column.label + (state.order === column.key ? (state.down ? " ↓" : " ↑") : "")))));
  }

  draw() {
    const words = state.search.toLowerCase().split(/\s+/).filter(Boolean);
    const found = this.rows.filter((row) => {
      const text = COLUMNS.map((column) => shown(column, row)).join(" ").toLowerCase();
      return words.every((word) => text.includes(word));
    });
    found.sort((a, b) => (state.down ? -1 : 1) * compared(a[state.order], b[state.order]) || compared(a.name, b.name));
    // Unchanged rows are not replaced, so that a click on one is not lost.
    const rows = new Map(found.map((row) => [row.id, {text: JSON.stringify(row), row}]));
    const nodes = [...rows].map(([id, {text, row}]) => {
      const before = this.drawn.get(id);
      return before?.text === text ? before : {text, node: this.row(row)};
    });
    this.drawn = new Map([...rows.keys()].map((id, index) => [id, nodes[index]]));
    const kept = new Set(nodes.map(({node}) => node));
    for (const child of [...this.body.children]) if (!kept.has(child)) child.remove();
    nodes.forEach(({node}, index) => {
      if (this.body.children[index] !== node) this.body.insertBefore(node, this.body.children[index] ?? null);
    });
    if (!this.rows.length) {
      this.body.replaceChildren(el("tr", {}, el("td", {colspan: COLUMNS.length + 1, class: "soft"},
        "There are no runs here yet. One appears as soon as it begins.")));
    }
    const all = `${this.rows.length} ${this.rows.length === 1 ? "run" : "runs"}`;
    this.count.textContent = found.length === this.rows.length ? all : `${found.length} of ${all}`;
    this.ticks();
  }

  row(row) {
    const tick = el("input", {type: "checkbox", "aria-label": `compare ${row.name}`, onchange: () => {
      if (tick.checked) state.ticked.add(row.id);
      else state.ticked.delete(row.id);
      this.ticks();
    }});
    tick.checked = state.ticked.has(row.id);
    const cells = COLUMNS.map((column) => {
      if (column.key === "name") return el("td", {class: "name"}, el("a", {href: `#/run/${row.id}`}, row.name));
      if (column.key === "status") return el("td", {}, badge(row.status));
      return el("td", {class: `${column.key}${column.number ? " number" : ""}`}, shown(column, row));
    });
    return el("tr", {}, el("td", {class: "tick"}, tick), ...cells);
  }

  ticks() {
    const {size} = state.ticked;
    this.compare.disabled = size < 2 || size > MOST_COMPARED;
    this.compare.textContent = size < 2 ? "Tick runs to compare them"
      : size > MOST_COMPARED ? `Compare at most ${MOST_COMPARED} runs` : `Compare ${size} runs`;
  }

  order(key) {
    state.down = state.order === key ? !state.down : ["started", "steps", "samples_per_s"].includes(key);
    state.order = key;
    this.drawHeader();
    this.draw();
  }

  destroy() {}
}

export function badge(status) {
  const known = ["running", "completed", "failed", "interrupted", "preempted", "unfinished", "gone"];
  const title = status === "unfinished" ? "no summary, and nothing written for a minute: killed, or it hangs" : null;
  return el("span", {class: `badge ${known.includes(status) ? status : ""}`, title}, status);
}

function compared(a, b) {
  if (a === null || a === undefined) return b === null || b === undefined ? 0 : -1;
  if (b === null || b === undefined) return 1;
  if (typeof a === "number" && typeof b === "number") return a - b;
  return String(a).localeCompare(String(b), "en", {numeric: true});
}
