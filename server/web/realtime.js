// A session of the server: OpenAI's realtime protocol, a transcription session.

const WORDS = "item.input_audio_transcription.words";
const TRANSCRIPTION = "conversation.item.input_audio_transcription";
const MAX_BUFFERED_BYTES = 2 ** 18;
const ROOM_POLL_MS = 10;
const SERVICE_RESTART = 1012; // the close code of a server that is being stopped
// What /health says of a server that is neither ready nor out of order.
const PASSING_STATES = { loading: "loading", stopping: "stopping", stopped: "stopping" };

export class SessionError extends Error {
  constructor(title, message) {
    super(message);
    this.title = title;
  }
}

function url(path) {
  return new URL(path, document.baseURI);
}

function authorization(key) {
  return key ? { Authorization: `Bearer ${key}` } : {};
}

// What the server is: {state, model, reason} with a state of "ready", "loading", "stopping",
// "failed", "key" or "offline".
export async function askServer(key) {
  let health;
  try {
    health = await fetch(url("health"));
  } catch {
    return { state: "offline" };
  }
  if (!health.ok) {
    const { status, reason } = await health.json().catch(() => ({}));
    return { state: PASSING_STATES[status] ?? "failed", reason };
  }
  try {
    const models = await fetch(url("v1/models"), { headers: authorization(key) });
    if (models.status === 401) return { state: "key" };
    return { state: "ready", model: (await models.json()).data[0].id };
  } catch {
    return { state: "offline" };
  }
}

// A browser can't send a key as a header of a socket, and a subprotocol has room only for some
// characters: the key buys a short-lived secret, which fits.
async function clientSecret(key) {
  let response;
  try {
    response = await fetch(url("v1/realtime/client_secrets"), {
      method: "POST",
      headers: authorization(key),
    });
  } catch {
    throw unreachable();
  }
  if (response.status === 401) throw new SessionError("The key is not valid.", "Enter another.");
  const body = await response.json();
  if (!response.ok) throw new SessionError("The server refused.", body.error.message);
  return body.value;
}

function unreachable() {
  return new SessionError("The server can't be reached.", "Is it still running?");
}

function stopping() {
  return new SessionError("The server is being stopped.", "The page waits for it to come back.");
}

function titleOf(code) {
  switch (code) {
    case "overloaded":
      return "The server is busy.";
    case "loading":
      return "The model is still loading.";
    case "idle_timeout":
    case "session_expired":
      return "The session has ended.";
    default:
      return "The server reports an error.";
  }
}

export class RealtimeSession {
  // Open a session; `onText` and `onEnd` are called until it has ended.
  //   onText({itemId, text, words, isFinal}): more text, or with isFinal the whole text
  //   onEnd(error): it is over; error is a SessionError, or null if all text is there
  static async open({ rateHz, delayMs, key, onText, onEnd }) {
    const session = new RealtimeSession(onText, onEnd);
    const protocols = ["realtime"];
    if (key) protocols.push(`openai-insecure-api-key.${await clientSecret(key)}`);
    await session.connect(protocols, rateHz, delayMs);
    return session;
  }

  constructor(onText, onEnd) {
    this.onText = onText;
    this.onEnd = onEnd;
    this.error = null;
    this.isOpen = false;
    this.isFinishing = false;
    this.numWaiting = 0; // utterances that wait for the rest of their text
  }

  connect(protocols, rateHz, delayMs) {
    const address = url("v1/realtime?intent=transcription");
    address.protocol = address.protocol.replace("http", "ws");
    this.socket = new WebSocket(address, protocols);
    return new Promise((resolve, reject) => {
      this.opened = resolve;
      this.refused = reject;
      this.socket.onopen = () => this.configure(delayMs, { type: "audio/pcm", rate: rateHz });
      this.socket.onmessage = ({ data }) => this.take(JSON.parse(data));
      this.socket.onclose = ({ code }) => this.end(code);
    });
  }

  send(message) {
    if (this.socket.readyState === WebSocket.OPEN) this.socket.send(JSON.stringify(message));
  }

  configure(delayMs, format) {
    const input = { transcription: { delay: delayMs }, turn_detection: null };
    if (format) input.format = format;
    this.send({
      type: "session.update",
      session: { type: "transcription", include: [WORDS], audio: { input } },
    });
  }

  append(pcm) {
    // Samples are little endian on every machine that runs a browser.
    const bytes = new Uint8Array(pcm.buffer, pcm.byteOffset, pcm.byteLength);
    this.send({ type: "input_audio_buffer.append", audio: btoa(String.fromCharCode(...bytes)) });
  }

  // End the utterance. Its text goes on coming.
  commit() {
    this.numWaiting++;
    this.send({ type: "input_audio_buffer.commit" });
  }

  // Change the delay now: it holds from the next utterance on, so one begins here.
  changeDelay(delayMs) {
    this.configure(delayMs);
    this.commit();
  }

  // End the last utterance, and the session once all its text is there.
  finish() {
    this.isFinishing = true;
    this.commit();
  }

  // Close at once; nothing is said about it.
  abandon() {
    this.onEnd = () => {};
    this.socket.close();
  }

  // Resolve once what was sent before is on its way, so that memory stays bounded.
  async hasRoom() {
    while (this.socket.bufferedAmount > MAX_BUFFERED_BYTES) {
      await new Promise((resolve) => setTimeout(resolve, ROOM_POLL_MS));
    }
  }

  take(event) {
    switch (event.type) {
      case "session.updated":
        this.isOpen = true;
        this.opened();
        break;
      case `${TRANSCRIPTION}.delta`:
        this.text(event, event.delta, false);
        break;
      case `${TRANSCRIPTION}.completed`:
        this.text(event, event.transcript, true);
        this.settle();
        break;
      case `${TRANSCRIPTION}.failed`:
      case "error":
        this.error = new SessionError(titleOf(event.error.code), event.error.message);
        if (event.type !== "error") this.settle();
        break;
    }
  }

  text(event, text, isFinal) {
    this.onText({ itemId: event.item_id, text, words: event.words ?? [], isFinal });
  }

  settle() {
    this.numWaiting--;
    if (this.isFinishing && this.numWaiting === 0) this.socket.close();
  }

  end(code) {
    const error = this.error ?? (code === SERVICE_RESTART ? stopping() : unreachable());
    if (!this.isOpen) {
      this.refused(error);
      return;
    }
    const isComplete = this.isFinishing && this.numWaiting === 0;
    this.onEnd(isComplete ? this.error : error);
  }
}
