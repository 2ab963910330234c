// Where audio comes from: the microphone, a file as it is played, a file at once.
// Each source calls `onChunk({pcm: Int16Array, peak, rms})` for every 40 ms and `onEnd()` after the
// last one. `open` may ask the user; `start` begins; `stop` ends early, and the rest still comes;
// `close` lets go of everything, and nothing comes any more.

export const FILE_RATE_HZ = 16_000;
const CHUNK_S = 0.04;
// Rates that the server takes; a device with another one is asked for the highest of these.
const RATES_HZ = [16_000, 22_050, 24_000, 32_000, 44_100, 48_000];
const MAX_RATE_HZ = 48_000;

export class AudioError extends Error {
  constructor(title, message) {
    super(message);
    this.title = title;
  }
}

// Play a graph into the worklet that cuts it into chunks.
class Recorder {
  constructor(context) {
    this.context = context;
  }

  static async open(context) {
    const recorder = new Recorder(context);
    await context.audioWorklet.addModule(new URL("pcm-worklet.js", import.meta.url));
    const chunkSamples = Math.round(context.sampleRate * CHUNK_S);
    recorder.node = new AudioWorkletNode(context, "pcm-recorder", {
      processorOptions: { chunkSamples },
    });
    // Silent; without a destination nothing would be pulled through it.
    recorder.node.connect(context.destination);
    return recorder;
  }

  listen({ onChunk, onEnd }) {
    this.node.port.onmessage = ({ data }) => (data.isLast ? onEnd() : onChunk(data));
  }

  flush() {
    this.node.port.postMessage("flush");
  }

  close() {
    this.node.port.onmessage = null;
    this.context.close();
  }
}

export class MicrophoneSource {
  isLive = true;

  // Ask for the microphone; `rateHz` is known afterwards.
  async open() {
    this.stream = await openMicrophone();
    try {
      await this.connect(new AudioContext({ sampleRate: FILE_RATE_HZ }));
    } catch (error) {
      if (error.name !== "NotSupportedError") throw error;
      // Firefox records only at the device's own rate.
      await this.context.close();
      let context = new AudioContext();
      if (!RATES_HZ.includes(context.sampleRate)) {
        await context.close();
        context = new AudioContext({ sampleRate: MAX_RATE_HZ });
      }
      await this.connect(context);
    }
    this.rateHz = this.context.sampleRate;
  }

  async connect(context) {
    this.context = context;
    this.input = context.createMediaStreamSource(this.stream);
    await context.suspend();
    this.recorder = await Recorder.open(context);
    this.input.connect(this.recorder.node);
  }

  async start(listener) {
    this.recorder.listen(listener);
    this.stream.getAudioTracks()[0].addEventListener("ended", () => this.stop());
    await this.context.resume();
  }

  stop() {
    this.release();
    this.recorder.flush();
  }

  close() {
    this.release();
    this.recorder?.close();
  }

  // Let go of the device; the browser then stops showing that it listens.
  release() {
    for (const track of this.stream?.getTracks() ?? []) track.stop();
  }
}

async function openMicrophone() {
  if (!navigator.mediaDevices) {
    throw new AudioError(
      "No microphone on this page.",
      "Browsers give it only to pages over HTTPS or on localhost. Files work.",
    );
  }
  try {
    return await navigator.mediaDevices.getUserMedia({
      audio: { channelCount: 1, echoCancellation: false, noiseSuppression: false },
    });
  } catch (error) {
    switch (error.name) {
      case "NotAllowedError":
        throw new AudioError(
          "The microphone is blocked.",
          "Allow it for this page in the browser's address bar, then press Start again.",
        );
      case "NotFoundError":
        throw new AudioError("No microphone was found.", "Plug one in, or choose a file.");
      case "NotReadableError":
        throw new AudioError(
          "The microphone is in use.",
          "Another program holds it. Close that one, then press Start again.",
        );
      default:
        throw new AudioError("The microphone can't be used.", error.message);
    }
  }
}

// Decode a file as mono at 16 kHz.
export async function decodeFile(blob) {
  const decoder = new OfflineAudioContext(1, 1, FILE_RATE_HZ);
  try {
    return await decoder.decodeAudioData(await blob.arrayBuffer());
  } catch {
    throw new AudioError(
      "This file can't be played.",
      "The browser knows no way to decode it. WAV, MP3, FLAC, Ogg and M4A usually work.",
    );
  }
}

// A file at the pace it was spoken: it is played, aloud or not, and recorded as it plays.
export class PlayedFileSource {
  isLive = true;
  rateHz = FILE_RATE_HZ;

  constructor(audio, isAudible) {
    this.audio = audio;
    this.isAudible = isAudible;
  }

  async open() {
    this.context = new AudioContext({ sampleRate: FILE_RATE_HZ });
    await this.context.suspend();
    this.recorder = await Recorder.open(this.context);
    this.player = new AudioBufferSourceNode(this.context, { buffer: this.audio });
    this.player.connect(this.recorder.node);
    this.gain = new GainNode(this.context, { gain: this.isAudible ? 1 : 0 });
    this.player.connect(this.gain).connect(this.context.destination);
  }

  setAudible(isAudible) {
    this.gain.gain.value = isAudible ? 1 : 0;
  }

  async start(listener) {
    this.recorder.listen(listener);
    this.player.addEventListener("ended", () => this.recorder.flush());
    this.player.start();
    await this.context.resume();
  }

  stop() {
    this.player.stop();
  }

  close() {
    this.recorder?.close();
  }
}

// A file as fast as the server takes it. `hasRoom` resolves when more can be sent.
export class WholeFileSource {
  isLive = false;
  rateHz = FILE_RATE_HZ;

  constructor(audio, hasRoom) {
    this.audio = audio;
    this.hasRoom = hasRoom;
    this.isStopped = false;
  }

  async open() {}

  async start(listener) {
    this.listener = listener;
    this.run();
  }

  async run() {
    const samples = mixToMono(this.audio);
    const chunkSamples = FILE_RATE_HZ * CHUNK_S;
    for (let start = 0; start < samples.length && !this.isStopped; start += chunkSamples) {
      await this.hasRoom();
      this.listener?.onChunk(measure(samples.subarray(start, start + chunkSamples)));
    }
    this.listener?.onEnd();
  }

  stop() {
    this.isStopped = true;
  }

  close() {
    this.isStopped = true;
    this.listener = null;
  }
}

function mixToMono(audio) {
  const mono = new Float32Array(audio.length);
  for (let channel = 0; channel < audio.numberOfChannels; channel++) {
    const samples = audio.getChannelData(channel);
    for (let i = 0; i < mono.length; i++) mono[i] += samples[i] / audio.numberOfChannels;
  }
  return mono;
}

function measure(samples) {
  const pcm = new Int16Array(samples.length);
  let peak = 0;
  let energy = 0;
  for (let i = 0; i < samples.length; i++) {
    const sample = Math.max(-1, Math.min(1, samples[i]));
    peak = Math.max(peak, Math.abs(sample));
    energy += sample * sample;
    pcm[i] = Math.round(sample * 32767);
  }
  return { pcm, peak, rms: Math.sqrt(energy / samples.length) };
}
