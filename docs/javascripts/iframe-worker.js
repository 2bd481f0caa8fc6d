// Search runs in a Worker, and browsers start none for a page that was opened from a folder: there it runs in a hidden frame.
if (location.protocol === "file:") {
  window.Worker = window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super()
      this.waiting = []
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      document.body.append(this.frame)
      const inside = this.frame.contentWindow
      inside.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
      const script = inside.document.createElement("script")
      script.src = url
      script.onload = () => {
        const waiting = this.waiting
        this.waiting = undefined
        waiting.forEach(data => this.postMessage(data))
      }
      inside.document.body.append(script)
    }

    postMessage(data) {
      if (this.waiting) this.waiting.push(data)
      else this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data }))
    }

    terminate() {
      this.frame.remove()
    }
  }
}
