// The text of a session: deltas and timed words in, lines of words on the page out.
//
// Words with their times come a little later than their letters. Until then the letters are the
// tail, in a paler colour:
//
//     [0:01] Good morning,  how are yo
//            '- words ---'  '- tail -'

const PAUSE_S = 1.0;
const SENTENCE_END = /[.?!…。？！؟।]["'”’)]*$/;

// What one utterance has said, and which of it has become words.
class Utterance {
  constructor() {
    this.text = "";
    this.matched = 0; // characters that belong to words
    this.words = [];
    this.arrivals = []; // {from, audioS}: letters from `from` on came when the audio was at audioS
  }

  get tail() {
    return this.text.slice(this.matched);
  }

  // Add letters, and find words among them. Returns the new words.
  add(text, words, audioS) {
    if (text) this.arrivals.push({ from: this.text.length, audioS });
    this.text += text;
    return words.map((word) => this.match(word));
  }

  match({ word, start, end }) {
    const found = this.text.indexOf(word, this.matched);
    const from = found < 0 ? this.matched : found;
    const gap = this.text.slice(this.matched, from);
    if (found >= 0) this.matched = from + word.length;
    const matched = { text: word, gap, start, end, latencyS: this.audioAt(from) - end };
    this.words.push(matched);
    return matched;
  }

  // The audio's time when a letter came.
  audioAt(position) {
    return this.arrivals.findLast(({ from }) => from <= position)?.audioS ?? NaN;
  }
}

export class Transcript {
  // Write into `list`, an <ol>; call `onLine(text)` for each line that is complete.
  constructor(list, onLine) {
    this.list = list;
    this.onLine = onLine;
    this.clear();
  }

  clear() {
    this.list.replaceChildren();
    this.utterances = new Map();
    this.line = null;
    this.tails = new Map();
    this.numWords = 0;
    this.latencies = [];
  }

  get isEmpty() {
    return this.list.childElementCount === 0;
  }

  get text() {
    const lines = [...this.list.querySelectorAll(".said")];
    return lines.map((line) => lineText(line)).join("\n");
  }

  // The median of the last words, in seconds; NaN before the first.
  get latencyS() {
    const sorted = this.latencies.filter(Number.isFinite).sort((a, b) => a - b);
    return sorted.length === 0 ? NaN : sorted[Math.floor(sorted.length / 2)];
  }

  // Take what the session says. `audioS` is how much audio there has been.
  take({ itemId, text, words, isFinal }, audioS) {
    const utterance = this.utterances.get(itemId) ?? new Utterance();
    this.utterances.set(itemId, utterance);
    if (isFinal) {
      this.complete(itemId, utterance, text, words);
    } else {
      for (const word of utterance.add(text, words, audioS)) this.addWord(word);
      this.showTail(itemId, utterance.tail, audioS);
    }
  }

  complete(itemId, utterance, text, words) {
    const missing = words.slice(utterance.words.length);
    for (const word of missing) this.addWord(utterance.match(word));
    // Letters that no word has taken stay as they are.
    this.showTail(itemId, "", 0);
    const rest = text.slice(utterance.matched).trim();
    if (rest) this.addWord({ text: rest, gap: " ", latencyS: NaN });
    this.utterances.delete(itemId);
    this.endLine();
  }

  addWord(word) {
    if (this.line !== null && word.start - this.line.endS > PAUSE_S) this.endLine();
    this.line ??= this.beginLine(word.start);
    const { said, hasWords, time } = this.line;
    // A tail begins a line before it is known when its first word began.
    if (!hasWords && word.start !== undefined) time.textContent = clock(word.start);
    if (hasWords && word.gap) said.insertBefore(document.createTextNode(" "), this.line.tail);
    said.insertBefore(wordElement(word), this.line.tail);
    this.line.hasWords = true;
    this.line.endS = word.end ?? this.line.endS;
    this.numWords++;
    this.latencies.push(word.latencyS);
    if (this.latencies.length > 20) this.latencies.shift();
    if (SENTENCE_END.test(word.text)) this.endLine();
  }

  showTail(itemId, tail, audioS) {
    if (tail.trim()) {
      this.line ??= this.beginLine(audioS);
      this.line.tail.textContent = tail;
    } else if (this.line !== null) {
      this.line.tail.textContent = "";
    }
  }

  beginLine(startS) {
    const item = document.createElement("li");
    const time = element("time", "at", clock(startS ?? 0));
    const said = element("p", "said", "");
    const tail = element("span", "tail", "");
    said.append(tail);
    item.append(time, said);
    this.list.append(item);
    return { item, time, said, tail, endS: startS ?? 0, hasWords: false };
  }

  endLine() {
    if (this.line === null) return;
    const { item, said, tail, hasWords } = this.line;
    tail.remove();
    this.line = null;
    if (hasWords) this.onLine(lineText(said));
    else item.remove();
  }
}

function wordElement({ text, start, end }) {
  const word = element("span", "word", text);
  if (end !== undefined) {
    word.title = `${start.toFixed(2)} to ${end.toFixed(2)} s`;
    word.dataset.start = start.toFixed(1);
  }
  return word;
}

// Times are drawn by the style sheet, so that they are neither read out nor copied.
function lineText(said) {
  return said.textContent.trim();
}

function element(name, className, text) {
  const made = document.createElement(name);
  made.className = className;
  made.textContent = text;
  return made;
}

// Seconds as 0:07, 12:34 or 1:02:03.
export function clock(seconds) {
  const whole = Math.floor(seconds);
  const parts = [Math.floor(whole / 60) % 60, whole % 60];
  if (whole >= 3600) parts.unshift(Math.floor(whole / 3600));
  return parts.map((part, i) => (i === 0 ? part : String(part).padStart(2, "0"))).join(":");
}
