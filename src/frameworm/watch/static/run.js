// One run: its state, findings and curves, kept up to date while it is running.
import {Chart, HeatMap} from "./charts.js";
import {badge} from "./table.js";
import {
  PHASES, bytes, colour, curveColour, el, load, moment, number, percent, phaseColour, phaseLabel, rate, seconds,
  share, whole,
} from "./dom.js";

const SHORTEST_MS = 2000;
// Metrics of how a profiled script's steps were assembled; the phases show the result.
const COUNTERS = ["fetches", "backwards", "optimizer_steps", "batches", "rows", "checkpoints"];
const xStep = {xFormat: whole, xName: "step", sync: "steps"};
const xTime = {xFormat: seconds, xName: "at", isTime: () => true, sync: "time"};

export class RunPage {
  constructor(parent, id) {
    this.id = id;
    this.zoom = [null, null];
    this.channel = "work_s";
    this.version = null;
    this.drawn = {};
    this.loading = false;
    this.loadedAt = 0;
    this.timer = null;
    const onZoom = (first, last) => this.setZoom(first, last);
    this.charts = {
      loss: new Chart({title: "Loss", format: (value) => number(value), ...xStep, onZoom}),
      phases: new Chart({title: "Step time by phase", format: seconds, fromZero: true, stacked: true, cut: true, broad: true,
        ...xStep, onZoom}),
      speed: new Chart({title: "Throughput", format: (value) => number(value), fromZero: true, ...xStep, onZoom}),
      step: new Chart({title: "Step time", format: seconds, fromZero: true, cut: true, ...xStep, onZoom}),
      accuracy: new Chart({title: "Validation accuracy", format: percent, tick: share, ...xStep, onZoom}),
      mfu: new Chart({title: "MFU", format: percent, tick: share, fromZero: true, ...xStep, onZoom}),
      rates: new Chart({title: "Learning rate", format: (value) => number(value, 3), fromZero: true, ...xStep, onZoom}),
      norm: new Chart({title: "Gradient norm", format: (value) => number(value), fromZero: true, cut: true, ...xStep, onZoom}),
      inside: new Chart({title: "Within the phases", format: seconds, fromZero: true, cut: true, ...xStep, onZoom}),
      counts: new Chart({title: "Other measures", format: (value) => number(value), ...xStep, onZoom}),
      memory: new Chart({title: "Memory", format: bytes, binary: true, fromZero: true, ...xTime}),
      gpu: new Chart({title: "GPU busy", format: percent, tick: share, fromZero: true, top: 1, ...xTime}),
      power: new Chart({title: "GPU power", format: (value) => `${number(value, 3)} W`, fromZero: true, ...xTime}),
      cpu: new Chart({title: "CPU", format: percent, tick: share, fromZero: true, top: 1, ...xTime}),
      network: new Chart({title: "Network of the machine", format: rate, binary: true, fromZero: true, ...xTime}),
      disk: new Chart({title: "Disk", format: rate, binary: true, fromZero: true, ...xTime}),
    };
    this.heat = new HeatMap((channel) => { this.channel = channel; this.loadCurves(); });
    this.head = el("div", {}, el("p", {class: "soft"}, "Reading the run."));
    this.verdict = el("section", {id: "verdict"});
    this.unzoom = el("button", {type: "button", hidden: true, onclick: () => this.setZoom(null, null)}, "Show all steps");
    this.range = el("span", {class: "soft"});
    this.log = el("pre", {id: "log", tabindex: "0"});
    this.logName = el("select", {"aria-label": "log file", onchange: () => this.loadLog(true)});
    this.logSection = el("section", {hidden: true}, el("h2", {}, "Log"), el("div", {class: "tools"}, this.logName), this.log);
    this.events = el("section");
    this.checkpoints = el("section");
    this.epochs = el("section");
    this.facts = el("section");
    const {memory, gpu, power, cpu, network, disk, phases, ...steps} = this.charts;
    this.machine = el("section", {}, el("h2", {}, "Machine"),
      el("div", {class: "charts"}, ...[gpu, memory, cpu, network, power, disk].map((chart) => chart.node)));
    parent.replaceChildren(
      this.head, this.verdict,
      el("section", {}, el("h2", {}, "Steps"),
        el("div", {class: "tools"}, el("span", {class: "soft"}, "Drag over a chart to zoom in, double-click to zoom out."),
          this.range, this.unzoom),
        el("div", {class: "charts"}, phases.node, ...Object.values(steps).map((chart) => chart.node), this.heat.node)),
      this.machine,
      el("div", {class: "columns"}, this.events, this.checkpoints, this.epochs, this.facts),
      this.logSection);
    for (const chart of Object.values(this.charts)) chart.node.hidden = true;
    this.heat.node.hidden = true;
    this.machine.hidden = true;
  }

  update(head) {
    if (head.status === "gone") {
      this.drawn = {};
      this.head.replaceChildren(el("p", {class: "warning-text"}, "The folder of this run is gone. What was read of it stays here."));
      return;
    }
    this.latest = head;
    document.title = `${head.name} · frameworm watch`;
    // Unchanged parts are not replaced: a reader may have scrolled them or selected text.
    this.changed("head", [head.name, head.status, head.about, head.progress, head.figures, head.steps > 0],
      () => this.drawHead(head));
    this.changed("verdict", [head.status, head.verdict, head.findings, head.notes], () => this.drawVerdict(head));
    this.drawLists(head);
    if (this.version !== head.version || head.progress < 1) this.schedule();
    this.version = head.version;
  }

  changed(part, data, draw) {
    const text = JSON.stringify(data);
    if (this.drawn[part] === text) return;
    this.drawn[part] = text;
    draw();
  }

  schedule() {
    if (this.timer !== null || this.loading) { this.again = true; return; }
    const wait = Math.max(0, SHORTEST_MS - (performance.now() - this.loadedAt));
    this.timer = setTimeout(() => { this.timer = null; this.loadCurves(); }, this.loadedAt ? wait : 0);
  }

  async loadCurves() {
    if (this.loading) { this.again = true; return; }
    this.loading = true;
    this.again = false;
    try {
      const [first, last] = this.zoom;
      const part = first === null ? "" : `&first=${first}&last=${last}`;
      const base = `api/runs/${this.id}`;
      const [series, machine] = await Promise.all([load(`${base}/series?bins=600${part}`), load(`${base}/system?bins=400`)]);
      this.drawSteps(series);
      this.drawMachine(machine);
      if (this.latest?.ranks > 1) {
        const ranks = await load(`${base}/ranks?columns=200&channel=${encodeURIComponent(this.channel)}`);
        this.heat.update(ranks, this.channel, channelLabel, seconds);
      }
      await this.loadLog(false);
    } catch (error) {
      this.range.textContent = error.message;
    } finally {
      this.loading = false;
      this.loadedAt = performance.now();
      if (this.again && !this.destroyed) this.schedule();
    }
  }

  setZoom(first, last) {
    this.zoom = first === null ? [null, null] : [Math.floor(first), Math.ceil(last)];
    this.unzoom.hidden = first === null;
    this.range.textContent = first === null ? "" : `Steps ${whole(this.zoom[0])} to ${whole(this.zoom[1])}.`;
    this.loadCurves();
  }

  drawHead(head) {
    const bar = el("div");
    bar.style.width = `${head.progress * 100}%`;
    const reading = head.progress < 1 ? el("div", {}, el("p", {class: "soft"},
      `Reading the steps: ${Math.floor(head.progress * 100)}%. The curves are not complete yet.`), el("div", {class: "progress"}, bar)) : null;
    this.head.replaceChildren(
      el("div", {class: "title"}, el("h1", {}, head.name), badge(head.status)),
      el("p", {class: "soft"}, head.about.join(" · ")),
      head.status === "unfinished" ? el("p", {class: "warning-text"}, `There is no summary, and nothing has been written${
        head.time ? ` since ${moment(head.time)}` : ""}: the run was killed, its machine is gone, or it hangs.`) : "",
      head.status === "running" && !head.steps ? el("p", {class: "soft"}, "Waiting for the first step.") : "",
      reading ?? "",
      el("dl", {class: "figures"}, ...head.figures.map((item) => el("div", {}, el("dt", {}, item.label), el("dd", {}, item.value)))));
  }

  drawVerdict(head) {
    const findings = head.findings.map((item) => {
      const verb = item.code === "compute_bound" ? "takes" : "costs";
      const cost = item.share ? `, ${verb} ${item.share}` : "";
      if (item.severity === "info") {
        return el("div", {class: "finding"}, el("h3", {}, `${item.code.replaceAll("_", " ")} (info${cost})`, " ",
          el("span", {class: "soft"}, item.evidence)));
      }
      return el("div", {class: `finding ${["critical", "warning"].includes(item.severity) ? item.severity : ""}`},
        el("h3", {}, `${item.code.replaceAll("_", " ")} (${item.severity}${cost})`),
        el("p", {class: "soft"}, item.evidence),
        item.remedies.length ? el("ul", {}, ...item.remedies.map((text) => el("li", {}, text))) : null,
        item.expected ? el("p", {}, `Expected speedup ${item.expected}`) : null);
    });
    const soFar = head.status === "running" ? " so far" : "";
    this.verdict.replaceChildren(el("h2", {}, `Verdict${soFar}: ${head.verdict || "not judged yet"}`), ...findings, ...head.notes.map((note) => el("p", {class: "soft"}, note)));
  }

  drawSteps(series) {
    const {x, channels} = series;
    const mean = (name) => channels[name]?.mean;
    const band = (name, label, tint, more = {}) => (channels[name]
      ? [{label, colour: tint, mean: channels[name].mean, low: channels[name].min, high: channels[name].max, ...more}] : []);
    const blue = colour("curve-a");
    const count = series.count.length && Math.max(...series.count) > 1
      ? "Lines: mean of neighbouring steps; bands: lowest to highest." : "";
    const ends = this.validations(x);
    const points = (key) => (ends.some((item) => item[key] !== null)
      ? [{label: "validation", colour: colour("curve-b"), dots: true, mean: x.map((_, index) =>
        ends.findLast((item) => item.index === index)?.[key] ?? null)}] : []);
    this.charts.loss.update(x, [...band("loss", "training", blue), ...points("loss")], count);
    this.charts.accuracy.update(x, points("accuracy"));
    const names = Object.keys(channels).filter((name) => name.startsWith("phase:")).map((name) => name.slice(6));
    const order = [...Object.keys(PHASES).filter((name) => names.includes(name)), ...names.filter((name) => !(name in PHASES))];
    this.charts.phases.update(x, order.map((name, index) => (
      {label: phaseLabel(name), colour: phaseColour(name, index), mean: channels[`phase:${name}`].mean})));
    this.charts.step.update(x, band("step_s", "step", blue), count);
    const train = mean("training_s");
    const per = (name, factor) => x.map((_, index) => {
      const [amount, time] = [mean(name)?.[index], train?.[index]];
      return amount == null || !(time > 0) ? null : amount * factor / time;
    });
    const speeds = [];
    if (mean("samples")?.some((value) => value > 0)) {
      speeds.push({label: "samples/s", colour: blue, mean: per("samples", series.samples_factor)});
    }
    if (mean("tokens")) {
      speeds.push({label: "tokens/s", colour: colour("curve-c"), mean: per("tokens", series.samples_factor)});
    }
    // Tokens and samples differ by orders of magnitude, so the axis shows only samples, which always exist.
    this.charts.speed.update(x, speeds.slice(0, 1), speeds.length > 1
      ? `Tokens now: ${number(speeds[1].mean.findLast((value) => value !== null))}/s.` : "");
    const flops = this.latest?.flops;
    const work = (index) => flopsOf(flops, mean("samples")?.[index], mean("tokens")?.[index], series.samples_factor);
    this.charts.mfu.update(x, flops && train ? [{label: "MFU", colour: blue,
      mean: train.map((time, index) => (time > 0 ? work(index) / time / flops.peak_per_s : null))}] : []);
    this.charts.rates.update(x, mean("lr") ? [{label: "lr", colour: blue, mean: mean("lr")}] : []);
    this.charts.norm.update(x, band("grad_norm", "norm", blue), count);
    const metrics = Object.keys(channels).filter((name) => name.startsWith("metric:") && !COUNTERS.includes(name.slice(7)));
    const curves = (chosen) => chosen.slice(0, 8).map((name, index) => (
      {label: name.slice(7).replace(/_s$/, "").replaceAll("_", " "), colour: curveColour(index), mean: channels[name].mean}));
    this.charts.inside.update(x, [
      ...(mean("rank_wait_s") ? [{label: "wait for ranks", colour: colour("curve-f"), mean: mean("rank_wait_s")}] : []),
      ...(mean("communication_s") ? [{label: "communication", colour: colour("curve-d"), mean: mean("communication_s")}] : []),
      ...curves(metrics.filter((name) => name.endsWith("_s")))]);
    this.charts.counts.update(x, curves(metrics.filter((name) => !name.endsWith("_s"))));
  }

  // Each validation is drawn at the bin that contains the last step of its epoch.
  validations(x) {
    const [first, last] = this.zoom;
    return (this.latest?.validation ?? []).filter((item) => first === null || (item.step >= first && item.step <= last))
      .map((item) => ({...item, index: x.findIndex((value) => value >= item.step)})).filter((item) => item.index >= 0);
  }

  drawMachine(machine) {
    const ranks = Object.entries(machine);
    this.machine.hidden = !ranks.length;
    const [[, own] = [null, null]] = ranks;
    if (!own) return;
    const name = (rank, label) => (ranks.length > 1 ? `rank ${rank} ${label}`.trim() : label || `rank ${rank}`);
    // Samplers of several ranks start at about the same time but sample at different moments; all share one axis.
    const tables = ranks.map(([, data]) => data);
    const x = own.x;
    const curves = (channel, label) => tables.flatMap((data, index) => (data.channels[channel]
      ? [{label: name(ranks[index][0], label), colour: curveColour(index), mean: resample(x, data.x, data.channels[channel].mean)}]
      : []));
    const mine = (channel, label, index) => (own.channels[channel]
      ? [{label, colour: curveColour(index), mean: own.channels[channel].mean}] : []);
    this.charts.gpu.update(x, curves("gpu_busy", ranks.length > 1 ? "" : "busy"));
    const gpu = curves("gpu_memory_bytes", "GPU");
    const total = own.channels.gpu_memory_total_bytes?.mean.findLast((value) => value !== null);
    const memory = gpu.length ? gpu : curves("rss_bytes", "process");
    this.charts.memory.update(x, memory, total ? `The device has ${bytes(total)}.` : "");
    this.charts.power.update(x, curves("gpu_power_w", ranks.length > 1 ? "" : "power"));
    this.charts.cpu.update(x, [...mine("cpu_busy", "all cores", 0), ...mine("cpu_busiest_core", "busiest core", 1),
      ...mine("io_wait", "waiting for disks", 2), ...mine("host_memory", "memory in use", 3)]);
    this.charts.network.update(x, [...mine("network_sent_bytes_per_s", "sent", 0),
      ...mine("network_received_bytes_per_s", "received", 1)]);
    this.charts.disk.update(x, [...mine("disk_read_bytes_per_s", "read", 0), ...mine("disk_write_bytes_per_s", "written", 1)]);
  }

  drawLists(head) {
    const table = (header, rows, kind = "") => el("div", {class: "scroll"}, el("table", {class: kind},
      header ? el("thead", {}, el("tr", {}, ...header.map((text) => el("th", {}, text)))) : null,
      el("tbody", {}, ...rows.map((row) => el("tr", {}, ...row.map((text, index) => el(kind === "facts" && !index ? "th" : "td", {}, text)))))));
    this.changed("events", head.events, () => this.events.replaceChildren(el("h2", {}, "Events"), head.events.length
      ? table(["time", "step", "what"], head.events.map((item) => [moment(item.time), whole(item.step), item.text]))
      : el("p", {class: "soft"}, "none")));
    this.changed("checkpoints", head.checkpoints, () => this.checkpoints.replaceChildren(el("h2", {}, "Checkpoints"),
      head.checkpoints.length
        ? table(["step", "written", "size"], head.checkpoints.map((item) => [whole(item.step), moment(item.time), item.size]))
        : el("p", {class: "soft"}, "none in the folder")));
    this.epochs.hidden = !head.epochs.rows.length;
    this.changed("epochs", head.epochs, () => this.epochs.replaceChildren(el("h2", {}, "Epochs"),
      table(head.epochs.header, [...head.epochs.rows].reverse(), "figures-only")));
    this.changed("facts", head.facts, () => this.facts.replaceChildren(el("h2", {}, "Run"), table(null, head.facts, "facts")));
    this.logSection.hidden = !head.logs.length;
    if (this.logName.childElementCount !== head.logs.length) {
      this.logName.replaceChildren(...head.logs.map((name) => el("option", {value: name}, name)));
    }
  }

  async loadLog(chosen) {
    if (this.logSection.hidden || !this.logName.value) return;
    const atEnd = this.log.scrollTop + this.log.clientHeight >= this.log.scrollHeight - 4;
    const text = plainLog(await load(`api/runs/${this.id}/log?name=${encodeURIComponent(this.logName.value)}`));
    if (text === this.log.textContent) return;
    this.log.textContent = text;
    if (atEnd || chosen) this.log.scrollTop = this.log.scrollHeight;
  }

  destroy() {
    this.destroyed = true;
    clearTimeout(this.timer);
    for (const chart of Object.values(this.charts)) chart.destroy();
  }
}

// As a terminal would show it: without escape codes, and only the last state of a redrawn progress bar.
function plainLog(text) {
  return text.replace(/\u001b\[[0-?]*[ -/]*[@-~]|\u001b\][^\u0007\u001b]*(\u0007|\u001b\\)?/g, "")
    .replaceAll("\r\n", "\n").replace(/[^\n]*\r(?=[^\n])/g, "");
}

// FLOPs of a step on all ranks, from its content on one rank; those of the mean step if the record has nothing more.
function flopsOf({per_step: mean, model}, samples, tokens, factor) {
  if (!model || !samples) return mean;
  if (model.per_token === null || tokens == null) return model.per_sample * samples * factor;
  return (model.per_token * tokens + (model.per_squared_token ?? 0) * tokens * tokens / samples) * factor;
}

function channelLabel(name) {
  if (name === "work_s") return "time without exposed communication";
  if (name === "step_s") return "step time";
  return phaseLabel(name.slice(6));
}

// The values of a curve at other positions: those of the preceding points.
export function resample(x, from, values) {
  let at = 0;
  return x.map((place) => {
    while (at + 1 < from.length && from[at + 1] <= place) at += 1;
    return from[at] <= place ? values[at] : null;
  });
}
