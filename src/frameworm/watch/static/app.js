// Shows one part of the page, and keeps it up to date from the stream of changes.
import {ComparePage} from "./compare.js";
import {RunPage} from "./run.js";
import {Table, MOST_COMPARED} from "./table.js";

const main = document.getElementById("main");
const live = document.getElementById("live");
const root = document.getElementById("root");
let page = null;
let stream = null;
let address = "";
let opened = false;

// From here on the cookie holds the token, so remove it from the address.
if (location.search) history.replaceState(null, "", location.pathname + location.hash);

function route() {
  const [kind, ids] = location.hash.replace(/^#\/?/, "").split("/");
  page?.destroy();
  document.title = "frameworm watch";
  if (kind === "run" && ids) {
    page = new RunPage(main, encodeURIComponent(decodeURIComponent(ids)));
    listen(`api/stream?run=${page.id}`);
  } else if (kind === "compare" && ids) {
    page = new ComparePage(main, ids.split(",").slice(0, MOST_COMPARED).map(encodeURIComponent));
    listen("api/stream");
  } else {
    page = new Table(main);
    listen("api/stream");
  }
}

function listen(from) {
  address = from;
  stream?.close();
  stream = null;
  if (document.hidden) return;
  const own = stream = new EventSource(address);
  stream.addEventListener("runs", (event) => {
    const data = JSON.parse(event.data);
    root.textContent = data.root;
    live.textContent = data.running ? `live, ${data.running} running` : "live";
    if (data.single && !opened && data.runs.length === 1 && !location.hash.replace(/^#\/?/, "")) {
      opened = true;
      location.hash = `#/run/${data.runs[0].id}`;
      return;
    }
    page.update(data);
  });
  stream.addEventListener("run", (event) => {
    const data = JSON.parse(event.data);
    live.textContent = data.status === "running" ? "live" : "";
    page.update(data);
  });
  stream.addEventListener("error", () => {
    if (own === stream) live.textContent = "no connection: is `frameworm watch` still running?";
  });
}

addEventListener("hashchange", route);
// A hidden page requests nothing.
document.addEventListener("visibilitychange", () => {
  if (document.hidden) { stream?.close(); stream = null; } else if (!stream) listen(address);
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", route);
route();
