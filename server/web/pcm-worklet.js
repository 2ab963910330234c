// On the audio thread: sound in, chunks of mono PCM16 out, each with its loudness.

class PcmRecorder extends AudioWorkletProcessor {
  constructor({ processorOptions }) {
    super();
    this.chunk = new Int16Array(processorOptions.chunkSamples);
    this.clear();
    // The only message: hand over what there is, as nothing more will come.
    this.port.onmessage = () => {
      this.post();
      this.port.postMessage({ isLast: true });
    };
  }

  clear() {
    this.used = 0;
    this.peak = 0;
    this.energy = 0;
  }

  post() {
    if (this.used === 0) return;
    const pcm = this.chunk.slice(0, this.used);
    const rms = Math.sqrt(this.energy / this.used);
    this.port.postMessage({ pcm, peak: this.peak, rms }, [pcm.buffer]);
    this.clear();
  }

  process([channels]) {
    const length = channels.length === 0 ? 0 : channels[0].length;
    for (let i = 0; i < length; i++) {
      let sample = 0;
      for (const channel of channels) sample += channel[i];
      sample = Math.max(-1, Math.min(1, sample / channels.length));
      this.peak = Math.max(this.peak, Math.abs(sample));
      this.energy += sample * sample;
      this.chunk[this.used++] = Math.round(sample * 32767);
      if (this.used === this.chunk.length) this.post();
    }
    return true;
  }
}

registerProcessor("pcm-recorder", PcmRecorder);
