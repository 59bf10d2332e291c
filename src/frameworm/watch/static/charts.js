// Charts over steps or time, drawn by uPlot, and the heat map of ranks.
import {clock, colour, el} from "./dom.js";

const HEIGHT = 210;
const TIMES = [0.001, 0.01, 0.1, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200,
  86400, 172800, 432000, 864000];
const WHOLE = Array.from({length: 16}, (_, power) => [1, 2, 5].map((digit) => digit * 10 ** power)).flat();
const POWERS = Array.from({length: 60}, (_, power) => 2 ** power);  // round numbers of bytes

// Outliers, such as the validation at the end of each epoch, must not flatten the rest: the axis ends above 9 of 10
// points, and a note says what is beyond.
function cutAt(values) {
  const sorted = values.filter((value) => value !== null && value !== undefined).sort((a, b) => a - b);
  if (sorted.length < 20) return null;
  const high = sorted[Math.floor(sorted.length * 0.9)];
  const most = sorted[sorted.length - 1];
  return high > 0 && most > 3 * high ? {limit: high * 1.6, most} : null;
}

export class Chart {
  // options: title, format, tick, binary, broad, fromZero, top, cut, stacked, xFormat, isTime, sync, onZoom
  // A curve is {label, colour, mean, low, high, dots, format}; all of its columns have the length of x.
  constructor(options) {
    this.options = options;
    this.legend = el("div", {class: "legend"});
    this.plot = el("div", {class: "plot"});
    this.note = el("p", {class: "note"});
    this.node = el("figure", {class: options.broad ? "chart broad" : "chart"},
      el("header", {}, el("h3", {}, options.title), this.legend), this.plot, this.note);
    this.node.style.margin = "0";
    this.u = null;
    this.shape = "";
    this.limit = null;
    this.observer = new ResizeObserver(() => {
      const width = this.plot.clientWidth;
      if (this.u && width && width !== this.u.width) this.u.setSize({width, height: HEIGHT});
    });
    this.observer.observe(this.plot);
  }

  update(x, curves, note = "") {
    const stacked = this.options.stacked;
    this.curves = curves;
    this.node.hidden = !x.length || !curves.length;
    if (this.node.hidden) return;
    const columns = stacked ? stack(curves) : curves.flatMap((curve) =>
      curve.low ? [curve.mean, curve.low, curve.high] : [curve.mean]);
    const cut = this.options.cut ? cutAt(stacked ? columns[0] : curves.flatMap((curve) => curve.mean)) : null;
    this.limit = cut && cut.limit;
    this.note.textContent = [cut ? `The axis is cut; the highest point is ${this.options.format(cut.most)}.` : "", note]
      .filter(Boolean).join(" ");
    this.note.hidden = !this.note.textContent;
    const data = [x, ...columns];
    const shape = JSON.stringify(curves.map((curve) => [curve.label, curve.colour, Boolean(curve.low), curve.dots]));
    if (this.u && shape === this.shape) this.u.setData(data);
    else this.build(shape, data);
    this.show(this.u.cursor.idx);
  }

  build(shape, data) {
    this.u?.destroy();
    this.shape = shape;
    const {options} = this;
    const axis = {stroke: colour("soft"), grid: {stroke: colour("rule"), width: 1}, ticks: {show: false},
      font: "12px system-ui, sans-serif"};
    const series = [{}];
    const bands = [];
    for (const curve of this.curves) {
      if (options.stacked) {
        series.push({label: curve.label, stroke: curve.colour, fill: curve.colour, width: 0, points: {show: false}});
        continue;
      }
      const place = series.length;
      series.push({label: curve.label, stroke: curve.colour, width: curve.dots ? 1 : 1.6, dash: curve.dash,
        points: curve.dots ? {show: true, size: 7, fill: curve.colour} : {show: data[0].length < 3}, spanGaps: true});
      if (curve.low) {
        const edge = {label: "", stroke: "transparent", width: 0, points: {show: false}};
        series.push(edge, {...edge});
        bands.push({series: [place + 2, place + 1], fill: fade(curve.colour)});
      }
    }
    this.u = new uPlot({
      width: this.plot.clientWidth || 400, height: HEIGHT, series, bands, legend: {show: false},
      scales: {x: {time: false}, y: {range: (u, low, high) => this.range(low, high)}},
      axes: [
        {...axis, values: (u, ticks) => ticks.map(options.isTime?.() ? clock : options.xFormat), size: 30, space: 60,
          incrs: () => (options.isTime?.() ? TIMES : WHOLE)},
        {...axis, values: (u, ticks) => ticks.map(options.tick ?? options.format), size: 74,
          incrs: options.binary ? POWERS : undefined},
      ],
      cursor: {
        sync: options.sync ? {key: options.sync} : undefined, y: false, points: {show: !options.stacked},
        drag: {x: Boolean(options.onZoom), y: false, setScale: false},
        bind: {dblclick: () => () => { options.onZoom?.(null, null); return null; }},
      },
      hooks: {
        setCursor: [(u) => this.show(u.cursor.idx)],
        setSelect: [(u) => {
          if (u.select.width < 4 || !options.onZoom) return;
          options.onZoom(u.posToVal(u.select.left, "x"), u.posToVal(u.select.left + u.select.width, "x"));
          u.setSelect({left: 0, top: 0, width: 0, height: 0}, false);
        }],
      },
    }, data, this.plot);
  }

  range(low, high) {
    if (low === null || high === null) return [0, 1];
    const top = this.options.top ?? this.limit ?? high;
    const bottom = this.options.fromZero ? Math.min(0, low) : low;
    if (top <= bottom) return [bottom - Math.abs(bottom) * 0.1 - 1e-9, bottom + Math.abs(bottom) * 0.1 + 1e-9];
    const margin = (top - bottom) * 0.06;
    return [this.options.fromZero ? bottom : bottom - margin, this.options.top ? top : top + margin];
  }

  // The legend shows the values under the cursor, or the latest ones.
  show(index) {
    const parts = this.curves.map((curve) => {
      let at = index ?? curve.mean.length - 1;
      // A phase missing from the last step took no time; any other curve has a latest value.
      if (index == null && !this.options.stacked) while (at > 0 && curve.mean[at] == null) at -= 1;
      const key = el("i", {class: "key"});
      key.style.background = curve.colour;
      const value = curve.mean[at];
      return el("span", {}, key, `${curve.label} `, el("b", {}, value == null ? "" : (curve.format ?? this.options.format)(value)));
    });
    const x = this.u?.data[0];
    if (index !== null && index !== undefined && x?.[index] !== undefined) {
      parts.push(el("span", {}, `${this.options.xName ?? "at"} ${this.options.xFormat(x[index])}`));
    }
    this.legend.replaceChildren(...parts);
  }

  destroy() {
    this.observer.disconnect();
    this.u?.destroy();
  }
}

function fade(text) {
  const parts = /^#(..)(..)(..)$/.exec(text);
  return parts ? `rgba(${parts.slice(1).map((part) => parseInt(part, 16)).join(",")},0.18)` : text;
}

// Cumulative sums from the last curve, highest first: each is filled down to zero, and the next covers its lower part.
function stack(curves) {
  const sums = [];
  let below = new Array(curves[0].mean.length).fill(0);
  for (const curve of [...curves].reverse()) {
    below = below.map((value, index) => value + (curve.mean[index] ?? 0));
    sums.push(below);
  }
  return sums.reverse();
}

export class HeatMap {
  constructor(onChannel) {
    this.select = el("select", {"aria-label": "what is compared", onchange: () => onChannel(this.select.value)});
    this.canvas = el("canvas", {class: "heat", role: "img", "aria-label": "Ranks beside each other over the run"});
    this.labels = el("div", {class: "heat-labels"});
    this.axis = el("div", {class: "heat-axis"});
    this.note = el("p", {class: "note"});
    this.node = el("figure", {class: "chart broad"},
      el("header", {}, el("h3", {}, "Ranks"), this.select),
      el("div", {class: "heat-frame"}, this.labels, this.canvas, this.axis), this.note);
    this.node.style.margin = "0";
    this.canvas.addEventListener("mousemove", (event) => this.point(event));
    this.canvas.addEventListener("mouseleave", () => this.describe());
  }

  update(data, channel, names, format) {
    this.node.hidden = data.ranks.length < 2;
    if (this.node.hidden) return;
    Object.assign(this, {data, format});
    const options = data.channels.map((name) => el("option", {value: name, selected: name === channel}, names(name)));
    if (this.select.childElementCount !== options.length) this.select.replaceChildren(...options);
    // Each rank relative to the median of all ranks at that time, so that moments slow for all ranks do not stand out.
    const {rows} = data;
    this.medians = data.x.map((_, column) => median(rows.map((row) => row[column])));
    const away = rows.flatMap((row) => row.map((value, column) => Math.abs(this.deviation(value, column) ?? 0)));
    away.sort((a, b) => a - b);
    this.scale = Math.max(0.05, away[Math.floor(away.length * 0.98)] ?? 0);
    this.draw();
    const ends = rows.length > 12 ? [data.ranks[0], data.ranks.at(-1)] : data.ranks;
    this.labels.replaceChildren(...ends.map((rank) => el("span", {}, `rank ${rank}`)));
    this.axis.replaceChildren(...[data.first, data.x.at(-1)].map((step) => el("span", {}, `step ${Math.round(step).toLocaleString("en")}`)));
    this.describe();
  }

  deviation(value, column) {
    const middle = this.medians[column];
    return value == null || !middle ? null : value / middle - 1;
  }

  draw() {
    const {rows, x} = this.data;
    const height = Math.max(6, Math.min(28, Math.floor(280 / rows.length)));
    this.canvas.width = x.length;
    this.canvas.height = rows.length;
    this.canvas.style.height = `${rows.length * height}px`;
    const context = this.canvas.getContext("2d");
    const [slow, fast, none] = [colour("above"), colour("below"), colour("page")].map(channels);
    const image = context.createImageData(x.length, rows.length);
    rows.forEach((row, line) => row.forEach((value, column) => {
      const away = this.deviation(value, column);
      const part = away === null ? 0 : Math.min(1, Math.abs(away) / this.scale);
      const end = away === null ? none : away > 0 ? slow : fast;
      const place = (line * x.length + column) * 4;
      for (let index = 0; index < 3; index += 1) image.data[place + index] = none[index] + (end[index] - none[index]) * part;
      image.data[place + 3] = value == null ? 0 : 255;
    }));
    context.putImageData(image, 0, 0);
  }

  point(event) {
    const box = this.canvas.getBoundingClientRect();
    const column = Math.min(this.data.x.length - 1, Math.floor((event.clientX - box.left) / box.width * this.data.x.length));
    const line = Math.min(this.data.rows.length - 1, Math.floor((event.clientY - box.top) / box.height * this.data.rows.length));
    const value = this.data.rows[line]?.[column];
    if (value == null) return;
    const away = this.deviation(value, column);
    this.note.textContent = `rank ${this.data.ranks[line]}, until step ${Math.round(this.data.x[column]).toLocaleString("en")}: ` +
      `${this.format(value)}` + (away === null ? "" : `, ${away < 0 ? "−" : "+"}${Math.abs(away * 100).toFixed(1)}% from the median rank`);
  }

  describe() {
    const limit = `${(this.scale * 100).toFixed(0)}%`;
    this.note.textContent = `Orange: slower than the median rank at that time, blue: faster; full colour at ${limit}.`;
  }
}

function median(values) {
  const sorted = values.filter((value) => value != null).sort((a, b) => a - b);
  if (!sorted.length) return null;
  const middle = Math.floor(sorted.length / 2);
  return sorted.length % 2 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
}

const channels = (text) => [1, 3, 5].map((place) => parseInt(text.slice(place, place + 2), 16));
