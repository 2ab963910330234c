// The loudness of the last seconds, drawn as bars that move to the left.

const BAR_PX = 3;
const GAP_PX = 2;
const FLOOR_DB = -60;

export function decibels(amplitude) {
  return 20 * Math.log10(Math.max(amplitude, 1e-6));
}

export class Meter {
  constructor(canvas) {
    this.canvas = canvas;
    this.levels = [];
    this.isDrawing = false;
    new ResizeObserver(() => this.redraw()).observe(canvas);
    document.addEventListener("themechange", () => this.redraw());
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.redraw());
  }

  get numBars() {
    return Math.max(1, Math.floor(this.canvas.clientWidth / (BAR_PX + GAP_PX)));
  }

  push(peak) {
    this.levels.push(Math.max(0, 1 - decibels(peak) / FLOOR_DB));
    if (this.levels.length > this.numBars) this.levels.splice(0, this.levels.length - this.numBars);
    this.redraw();
  }

  clear() {
    this.levels = [];
    this.redraw();
  }

  redraw() {
    if (this.isDrawing) return;
    this.isDrawing = true;
    requestAnimationFrame(() => {
      this.isDrawing = false;
      this.draw();
    });
  }

  draw() {
    const { canvas } = this;
    const scale = devicePixelRatio;
    const [width, height] = [canvas.clientWidth, canvas.clientHeight];
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
    const pen = canvas.getContext("2d");
    pen.scale(scale, scale);
    const style = getComputedStyle(canvas);
    const colors = {
      quiet: style.getPropertyValue("--meter-quiet"),
      loud: style.getPropertyValue("--accent"),
      clipped: style.getPropertyValue("--danger"),
    };
    const { numBars } = this;
    for (let i = 0; i < numBars; i++) {
      const level = this.levels[this.levels.length - numBars + i] ?? 0;
      const barHeight = Math.max(BAR_PX, level * (height - 8));
      pen.fillStyle = level >= 1 ? colors.clipped : level > 0.02 ? colors.loud : colors.quiet;
      pen.beginPath();
      pen.roundRect(
        i * (BAR_PX + GAP_PX), (height - barHeight) / 2, BAR_PX, barHeight, BAR_PX / 2,
      );
      pen.fill();
    }
  }
}
