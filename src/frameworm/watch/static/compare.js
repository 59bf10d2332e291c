// Several runs on the same axes, and their metrics side by side.
import {Chart} from "./charts.js";
import {badge} from "./table.js";
import {curveColour, el, load, number, percent, seconds, share, whole} from "./dom.js";

const RUNNING_MS = 4000;
const READING_MS = 300;

export class ComparePage {
  constructor(parent, ids) {
    this.ids = ids;
    this.axis = el("select", {"aria-label": "axis", onchange: () => this.draw()},
      el("option", {value: "step"}, "by step"), el("option", {value: "time"}, "by time since the first step"));
    const x = {xFormat: (value) => (this.axis.value === "step" ? whole(value) : seconds(value)), xName: "at",
      isTime: () => this.axis.value === "time", sync: "compare"};
    this.charts = {
      loss: new Chart({title: "Loss", format: (value) => number(value), broad: true, ...x}),
      speed: new Chart({title: "Samples per second", format: (value) => number(value), fromZero: true, ...x}),
      step: new Chart({title: "Step time", format: seconds, fromZero: true, cut: true, ...x}),
      wait: new Chart({title: "Share of the step spent waiting for data", format: percent, tick: share, fromZero: true, ...x}),
      exposed: new Chart({title: "Share of the step in exposed communication", format: percent, tick: share, fromZero: true, ...x}),
    };
    this.table = el("div", {class: "wide spaced"}, el("p", {class: "soft"}, "Reading the runs."));
    parent.replaceChildren(el("h1", {}, `${ids.length} runs compared`), el("div", {class: "tools"}, this.axis), this.table,
      el("div", {class: "charts"}, ...Object.values(this.charts).map((chart) => chart.node)));
    document.title = "compare · frameworm watch";
    this.load();
  }

  update() {}  // the table changes less often than the runs that are compared

  async load() {
    const found = await Promise.allSettled(this.ids.map(async (id) => {
      const [head, series] = await Promise.all([load(`api/runs/${id}`), load(`api/runs/${id}/series?bins=500`)]);
      return {head, series};
    }));
    if (this.destroyed) return;
    this.runs = found.filter((item) => item.status === "fulfilled").map((item) => item.value);
    this.draw();
    // The server reads a long run in portions, one per request.
    const wait = this.runs.some(({head}) => head.progress < 1) ? READING_MS
      : this.runs.some(({head}) => head.status === "running") ? RUNNING_MS : null;
    if (wait !== null) this.timer = setTimeout(() => this.load(), wait);
  }

  draw() {
    if (!this.runs) return;
    const labels = [...new Set(this.runs.flatMap((run) => run.head.figures.map((item) => item.label)))];
    const cell = (run, label) => run.head.figures.find((item) => item.label === label)?.value ?? "";
    const keyed = (run, index) => {
      const key = el("i", {class: "key"});
      key.style.background = curveColour(index);
      return el("th", {}, key, el("a", {href: `#/run/${run.head.id}`}, run.head.name));
    };
    this.table.replaceChildren(el("table", {},
      el("thead", {}, el("tr", {}, el("th", {}, ""), ...this.runs.map(keyed))),
      el("tbody", {},
        el("tr", {}, el("td", {class: "soft"}, "status"), ...this.runs.map((run) => el("td", {}, badge(run.head.status)))),
        el("tr", {}, el("td", {class: "soft"}, "verdict"), ...this.runs.map((run) => el("td", {}, run.head.verdict))),
        ...labels.map((label) => el("tr", {}, el("td", {class: "soft"}, label), ...this.runs.map((run) => el("td", {}, cell(run, label))))))));
    this.curves("loss", (run) => run.series.channels.loss?.mean);
    this.curves("step", (run) => run.series.channels.step_s?.mean);
    this.curves("speed", (run) => ratio(run, "samples", "training_s", run.series.samples_factor));
    this.curves("wait", (run) => ratio(run, "phase:data_wait", "step_s", 1));
    this.curves("exposed", (run) => ratio(run, "phase:communication_exposed", "step_s", 1));
  }

  curves(name, values) {
    const byTime = this.axis.value === "time";
    const shown = this.runs.map((run, index) => ({run, index, mean: values(run)})).filter((item) => item.mean?.some((value) => value !== null));
    const tables = shown.map(({run, mean}) => {
      const {x, time} = run.series;
      // A clock that went back must not reverse the axis.
      let last = -Infinity;
      const places = byTime ? time.map((moment) => (last = Math.max(last, moment - time[0]))) : x;
      const kept = places.map((place, index) => index).filter((index) => index === 0 || places[index] > places[index - 1]);
      return [kept.map((index) => places[index]), kept.map((index) => mean[index])];
    });
    if (!tables.length) { this.charts[name].update([], []); return; }
    const [x, ...columns] = tables.length > 1 ? uPlot.join(tables) : tables[0];
    this.charts[name].update(x, shown.map(({run, index}, place) => (
      {label: run.head.name, colour: curveColour(index), mean: columns[place]})));
  }

  destroy() {
    this.destroyed = true;
    clearTimeout(this.timer);
    for (const chart of Object.values(this.charts)) chart.destroy();
  }
}

function ratio(run, above, below, factor) {
  const {channels} = run.series;
  return channels[above] && channels[below]
    ? channels[above].mean.map((value, index) => {
      const whole = channels[below].mean[index];
      return value === null || !(whole > 0) ? null : value * factor / whole;
    }) : undefined;
}
