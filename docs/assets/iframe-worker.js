// Search without a server: browsers start no worker from file://, so the worker's script runs in a hidden frame.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      const ready = new Promise(done => addEventListener("message", function first(event) {
        if (event.source === frame.contentWindow && event.data === "ready") {
          removeEventListener("message", first);
          done();
        }
      }));
      addEventListener("message", event => {
        if (event.source !== frame.contentWindow || event.data === "ready") return;
        const message = new MessageEvent("message", { data: event.data });
        this.dispatchEvent(message);
        if (this.onmessage) this.onmessage(message);
      });
      frame.srcdoc = `<script>window.postMessage = data => parent.postMessage(data, "*")<\/script>
        <script src="${url}"><\/script><script>parent.postMessage("ready", "*")<\/script>`;
      // The script listens to "message" events of its window; ours are dispatched there.
      this.send = data => ready.then(() =>
        frame.contentWindow.dispatchEvent(new frame.contentWindow.MessageEvent("message", { data })));
      document.body ? document.body.append(frame) : addEventListener("load", () => document.body.append(frame));
    }
    postMessage(data) { this.send(data); }
    terminate() {}
  };
}
