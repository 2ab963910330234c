// The page: what is pressed, what is shown. One transcription runs at a time.
//
//     idle --> starting --> running --> finishing --> idle

import {
  AudioError, FILE_RATE_HZ, MicrophoneSource, PlayedFileSource, WholeFileSource, decodeFile,
} from "./audio.js";
import { Meter, decibels } from "./meter.js";
import { RealtimeSession, SessionError, askServer } from "./realtime.js";
import { Transcript, clock } from "./transcript.js";

// The delays that the model knows: 80 ms to 1.2 s, and 2.4 s.
const DELAYS_MS = [...Array.from({ length: 15 }, (_, i) => 80 * (i + 1)), 2400];
const HEALTH_POLL_MS = 2000;

const STATUS = {
  checking: "Connecting",
  ready: "Ready",
  loading: "Loading the model",
  stopping: "Being stopped",
  failed: "Out of order",
  key: "Key needed",
  offline: "Not reachable",
  live: "Live",
};
const BUTTON = { idle: "Start", starting: "Starting", running: "Stop", finishing: "Finishing" };

const $ = (id) => document.getElementById(id);

const meter = new Meter($("meter"));
const transcript = new Transcript($("lines"), (line) => {
  // Read out by screen readers, a line at a time.
  $("announcer").textContent = line;
});

let phase = "idle";
let serverState = "checking";
let key = "";
let file = null; // {name, audio: AudioBuffer}
let healthTimer = 0;
let run = null; // {source, session, numSamples, lastChunkMs, startedMs}

// ------------------------------------------------------------------ what is shown

function chosen(name) {
  return document.querySelector(`input[name="${name}"]:checked`).value;
}

function delayMs() {
  return DELAYS_MS[$("delay").value];
}

function showPhase(next) {
  phase = next;
  document.body.dataset.phase = phase;
  $("toggle-text").textContent = BUTTON[phase];
  for (const input of document.querySelectorAll('[name="source"], [name="pace"], #file, .sample')) {
    input.disabled = phase !== "idle";
  }
  showReadiness();
}

function showReadiness() {
  const lacksFile = chosen("source") === "file" && file === null;
  const canStart = serverState === "ready" && !lacksFile;
  $("toggle").disabled = phase === "idle" ? !canStart : phase !== "running";
  const state = phase === "idle" ? serverState : "live";
  $("status").dataset.state = state;
  $("status-text").textContent = STATUS[state];
}

function showTranscriptState() {
  $("empty").hidden = !transcript.isEmpty;
  $("copy").disabled = transcript.isEmpty;
  $("clear").disabled = transcript.isEmpty || phase !== "idle";
}

function showError(error) {
  $("alert").hidden = error === null;
  if (error === null) return;
  const isKnown = error instanceof AudioError || error instanceof SessionError;
  if (!isKnown) console.error(error);
  $("alert-title").textContent = isKnown ? error.title : "Something went wrong.";
  $("alert-text").textContent = error.message;
}

function showSource() {
  const isFile = chosen("source") === "file";
  $("file-pane").hidden = !isFile;
  $("sound-field").hidden = !isFile || chosen("pace") !== "realtime";
  showReadiness();
}

function showDelay() {
  const text = `${delayMs()} ms`;
  $("delay-value").textContent = text;
  $("delay").setAttribute("aria-valuetext", text);
}

// How much audio there has been, in seconds.
function sentS() {
  return run.numSamples / run.source.rateHz;
}

function showStats() {
  $("stat-words").textContent = transcript.numWords;
  $("stat-audio").textContent = clock(sentS());
  if (run.source.isLive) {
    const { latencyS } = transcript;
    $("stat-latency").textContent = Number.isNaN(latencyS) ? "–" : `${latencyS.toFixed(2)} s`;
  } else {
    const seconds = (performance.now() - run.startedMs) / 1000;
    $("stat-latency").textContent = `${(sentS() / seconds).toFixed(1)}×`;
  }
}

function levelText(rms) {
  const level = Math.round(decibels(rms));
  return level > -90 ? `${level} dB`.replace("-", "\u2212") : "silent";
}

function isAtEnd(box) {
  return box.scrollHeight - box.scrollTop - box.clientHeight < 80;
}

// ------------------------------------------------------------------ the server

async function watchServer() {
  const server = await askServer(key);
  serverState = server.state;
  if (server.model) $("model").textContent = server.model;
  $("key-form").hidden = serverState !== "key" && key === "";
  if (serverState === "failed") {
    showError(new SessionError("The server is out of order.", server.reason ?? ""));
  }
  showReadiness();
  clearTimeout(healthTimer);
  const isForUser = serverState === "ready" || serverState === "key";
  if (!isForUser) healthTimer = setTimeout(watchServer, HEALTH_POLL_MS);
}

async function useKey(event) {
  event.preventDefault();
  key = $("key").value.trim();
  showError(null);
  await watchServer();
  const isRefused = serverState === "key";
  $("key-note").textContent = isRefused
    ? "The server does not know this key."
    : "The key is used. It stays in this tab.";
  $("key-form").dataset.state = isRefused ? "refused" : "accepted";
  if (isRefused) $("key").select();
  else $("toggle").focus();
}

// ------------------------------------------------------------------ a transcription

function newSource() {
  if (chosen("source") === "microphone") return new MicrophoneSource();
  if (chosen("pace") === "realtime") return new PlayedFileSource(file.audio, $("sound").checked);
  return new WholeFileSource(file.audio, () => run.session.hasRoom());
}

async function start() {
  showError(null);
  showPhase("starting");
  const source = newSource();
  let session = null;
  try {
    await source.open();
    await watchServer();
    if (serverState !== "ready") throw new SessionError(`${STATUS[serverState]}.`, "");
    session = await RealtimeSession.open({
      rateHz: source.rateHz, delayMs: delayMs(), key, onText: takeText, onEnd: end,
    });
    const now = performance.now();
    run = { source, session, numSamples: 0, lastChunkMs: now, startedMs: now };
    transcript.clear();
    meter.clear();
    $("stat-latency-name").textContent = source.isLive ? "Latency" : "Speed";
    showStats();
    showPhase("running");
    showTranscriptState();
    await source.start({ onChunk: takeChunk, onEnd: finish });
  } catch (error) {
    source.close();
    session?.abandon();
    run = null;
    showError(error);
    showPhase("idle");
  }
}

function takeChunk({ pcm, peak, rms }) {
  run.session.append(pcm);
  run.numSamples += pcm.length;
  run.lastChunkMs = performance.now();
  meter.push(peak);
  $("stat-level").textContent = levelText(rms);
  $("stat-audio").textContent = clock(sentS());
}

function takeText(event) {
  const box = $("transcript");
  const follows = isAtEnd(box);
  const audioS = sentS() + (performance.now() - run.lastChunkMs) / 1000;
  transcript.take(event, audioS);
  showStats();
  showTranscriptState();
  if (follows) box.scrollTop = box.scrollHeight;
}

function stop() {
  showPhase("finishing");
  run.source.stop();
}

// The audio has ended; the last words are to come.
function finish() {
  showPhase("finishing");
  run.session.finish();
}

// The session is over.
function end(error) {
  run.source.close();
  run = null;
  showError(error);
  showPhase("idle");
  showTranscriptState();
  if (error !== null) watchServer();
}

function toggle() {
  if (phase === "idle" && !$("toggle").disabled) start();
  else if (phase === "running") stop();
}

async function copyText() {
  if (navigator.clipboard) {
    await navigator.clipboard.writeText(transcript.text);
    $("copy").textContent = "Copied";
  } else {
    // Only pages over HTTPS or on localhost may write to the clipboard.
    getSelection().selectAllChildren($("lines"));
    $("copy").textContent = "Selected";
  }
  setTimeout(() => ($("copy").textContent = "Copy"), 1500);
}

// ------------------------------------------------------------------ files

async function takeFile(blob, name) {
  document.querySelector('input[name="source"][value="file"]').checked = true;
  showSource();
  showError(null);
  $("file-name").textContent = name;
  $("file-note").textContent = "Reading";
  try {
    const audio = await decodeFile(blob);
    file = { name, audio };
    $("file-note").textContent = clock(audio.length / FILE_RATE_HZ);
  } catch (error) {
    file = null;
    $("file-note").textContent = "Choose another one";
    showError(error);
  }
  showReadiness();
}

async function playSample() {
  const response = await fetch(new URL("sample.wav", import.meta.url));
  await takeFile(await response.blob(), "The sample");
  toggle();
}

async function offerSample() {
  const response = await fetch(new URL("sample.wav", import.meta.url), { method: "HEAD" });
  for (const button of document.querySelectorAll(".sample")) button.hidden = !response.ok;
}

function takeDrop(event) {
  event.preventDefault();
  document.body.classList.remove("dropping");
  const [dropped] = event.dataTransfer.files;
  if (dropped && phase === "idle") takeFile(dropped, dropped.name);
}

// ------------------------------------------------------------------ wiring

$("toggle").addEventListener("click", toggle);
$("key-form").addEventListener("submit", useKey);
$("file").addEventListener("change", ({ target }) => {
  const [file] = target.files;
  if (file) takeFile(file, file.name);
});
for (const button of document.querySelectorAll(".sample")) {
  button.addEventListener("click", playSample);
}
$("delay").addEventListener("input", showDelay);
$("delay").addEventListener("change", () => {
  if (phase === "running") run.session.changeDelay(delayMs());
});
$("show-times").addEventListener("change", ({ target }) => {
  $("transcript").classList.toggle("with-times", target.checked);
});
$("sound").addEventListener("change", ({ target }) => {
  if (run?.source instanceof PlayedFileSource) run.source.setAudible(target.checked);
});
for (const input of document.querySelectorAll('[name="source"], [name="pace"]')) {
  input.addEventListener("change", showSource);
}
$("copy").addEventListener("click", copyText);
$("clear").addEventListener("click", () => {
  transcript.clear();
  meter.clear();
  for (const id of ["stat-latency", "stat-level"]) $(id).textContent = "–";
  $("stat-words").textContent = "0";
  $("stat-audio").textContent = "0:00";
  showTranscriptState();
});
document.addEventListener("keydown", (event) => {
  const isFree = event.target === document.body || event.target === $("transcript");
  if (event.code === "Space" && isFree && !event.repeat) {
    event.preventDefault();
    toggle();
  }
});
document.addEventListener("dragover", (event) => {
  event.preventDefault();
  document.body.classList.add("dropping");
});
document.addEventListener("dragleave", (event) => {
  if (event.relatedTarget === null) document.body.classList.remove("dropping");
});
document.addEventListener("drop", takeDrop);

showDelay();
showSource();
showPhase("idle");
showTranscriptState();
watchServer();
offerSample();
