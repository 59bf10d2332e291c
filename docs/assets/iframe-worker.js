// Search runs in a Worker, which browsers refuse to pages opened from the disk. There, this runs it in a hidden frame.
class FrameWorker extends EventTarget {
  constructor(url) {
    super();
    this.frame = document.createElement("iframe");
    this.frame.hidden = true;
    document.body.appendChild(this.frame);
    this.worker = this.frame.contentWindow;
    const imports = async (...urls) => {
      for (const url of urls) {
        await new Promise((resolve, reject) => {
          const script = document.createElement("script");
          script.src = url;
          script.onload = resolve;
          script.onerror = reject;
          document.body.appendChild(script);
        });
      }
    };
    window.addEventListener("message", (event) => {
      if (event.source !== this.worker) return;
      const message = new MessageEvent("message", { data: event.data });
      this.dispatchEvent(message);
      if (this.onmessage) this.onmessage(message);
    });
    this.worker.document.open();
    this.worker.document.write(
      `<html><body><script>postMessage = (data) => parent.postMessage(data, "*"); importScripts = ${imports}</` +
        `script><script src="${url}"></` +
        `script></body></html>`
    );
    this.worker.document.close();
    this.ready = new Promise((resolve) => this.worker.addEventListener("load", resolve));
  }

  postMessage(data) {
    this.ready.then(() => this.worker.dispatchEvent(new MessageEvent("message", { data })));
  }

  terminate() {
    this.frame.remove();
  }
}

if (location.protocol === "file:") window.Worker = FrameWorker;
