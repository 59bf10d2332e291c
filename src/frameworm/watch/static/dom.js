// Small helpers. Everything that comes from a run is inserted as text, never as markup.

export function el(tag, options = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(options)) {
    if (name === "class") node.className = value;
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, String(value));
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

export const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
export const CURVES = ["a", "b", "c", "d", "e", "f", "g", "h"];
export const curveColour = (index) => colour(`curve-${CURVES[index % CURVES.length]}`);

// The colours of the report.
export const PHASES = {
  data_wait: "#e69f00", transfer: "#f0e442", forward: "#56b4e9", backward: "#3d8fc4",
  communication_exposed: "#e0703a", optimizer: "#2eb58c", checkpoint: "#cc79a7", validation: "#9f8fd6",
  other: "#a8adb3",
};
const MORE_PHASES = ["#7d8b99", "#b9a36a", "#8f6f5e", "#6f9e8a"];
export const phaseColour = (name, index) => PHASES[name] ?? MORE_PHASES[index % MORE_PHASES.length];
export const phaseLabel = (name) =>
  name === "communication_exposed" ? "exposed communication" : name.replaceAll("_", " ");

const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

export function number(value, digits = 4) {
  if (!isNumber(value)) return typeof value === "string" ? value : "";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 10 ** (digits - 1) && size < 1e15) return Math.round(value).toLocaleString("en");
  return size < 1e-4 || size >= 1e15 ? value.toExponential(2) : String(Number(value.toPrecision(digits)));
}

export function seconds(value) {
  if (!isNumber(value)) return "";
  const size = Math.abs(value);
  if (size === 0) return "0 s";
  if (size < 1e-3) return `${number(value * 1e6, 3)} us`;
  if (size < 1) return `${number(value * 1e3, 3)} ms`;
  if (size < 60) return `${number(value, 3)} s`;
  const whole = Math.round(size);
  const [hours, minutes] = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60];
  return hours ? `${hours} h ${String(minutes).padStart(2, "0")} min`
    : `${minutes} min ${String(whole % 60).padStart(2, "0")} s`;
}

// A duration in a short form for axes: 45 s, 1:40, 2:00:00.
export function clock(value) {
  if (!isNumber(value) || Math.abs(value) < 60) return value === 0 ? "0" : seconds(value);
  const total = Math.round(value);
  const [hours, minutes, rest] = [Math.floor(total / 3600), Math.floor(total / 60) % 60, total % 60];
  const pad = (part) => String(part).padStart(2, "0");
  return hours ? `${hours}:${pad(minutes)}:${pad(rest)}` : `${minutes}:${pad(rest)}`;
}

export function bytes(value) {
  if (!isNumber(value)) return "";
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (Math.abs(value) < 1023.5) return `${number(value, 3)} ${unit}`;
    value /= 1024;
  }
  return `${number(value, 3)} TiB`;
}

export const rate = (value) => (isNumber(value) ? `${bytes(value)}/s` : "");
export const percent = (value) => (isNumber(value) ? `${(value * 100).toFixed(1)}%` : "");
export const share = (value) => `${Number((value * 100).toFixed(1))}%`;
export const whole = (value) => (isNumber(value) ? Math.round(value).toLocaleString("en") : "");

export function moment(value) {
  if (!isNumber(value) || value <= 0 || value > 8e12) return "";
  const date = new Date(value * 1000);
  const pad = (part) => String(part).padStart(2, "0");
  return `${date.getFullYear()}-${pad(date.getMonth() + 1)}-${pad(date.getDate())} ` +
    `${pad(date.getHours())}:${pad(date.getMinutes())}:${pad(date.getSeconds())}`;
}

export async function load(path) {
  const response = await fetch(path, {headers: {Accept: "application/json"}});
  if (!response.ok) throw new Error(response.status === 403 ? "the token has changed: open the printed address again"
    : response.status === 404 ? "this run is gone" : `the server answered ${response.status}`);
  return response.headers.get("content-type").startsWith("application/json") ? response.json() : response.text();
}
