// The search runs in a worker, and browsers start none for pages that are opened as files. There it runs in a hidden frame.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.documentElement.append(frame);
      const inside = frame.contentWindow;
      const waiting = [];
      inside.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }));
      inside.importScripts = (...urls) => Promise.all(urls.map(src => this.#load(inside, src)));
      this.postMessage = data => waiting.push(data);
      this.#load(inside, url).then(() => {
        this.postMessage = data => inside.dispatchEvent(new MessageEvent("message", { data }));
        waiting.forEach(this.postMessage);
      });
    }

    #load(inside, src) {
      return new Promise((done, failed) => {
        const script = inside.document.createElement("script");
        Object.assign(script, { src, onload: done, onerror: failed });
        inside.document.body.append(script);
      });
    }
  };
}
