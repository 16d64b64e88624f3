// Search runs in a worker, and browsers start none for pages that are opened as files: there a hidden frame runs it.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      frame.srcdoc = "<body></body>";
      this.started = new Promise((started) => {
        frame.onload = () => {
          const inside = frame.contentWindow;
          inside.addEventListener = (kind, heard) => { if (kind === "message") this.heard = heard; };
          inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
          const script = frame.contentDocument.createElement("script");
          script.src = new URL(url, location.href);
          script.onload = started;
          frame.contentDocument.body.append(script);
        };
      });
      document.body.append(frame);
    }

    postMessage(data) {
      this.started.then(() => this.heard(new MessageEvent("message", { data })));
    }
  };
}
