// A small line over the last values, on a canvas.

const inkOf = (canvas) => getComputedStyle(canvas).color;

// `values`: oldest first, null where nothing is known; the newest is at the right edge, and
// `maxValues` fill the width. The top is `ceiling`, or the largest value.
export const drawSparkline = (canvas, values, { maxValues = 60, ceiling = 0 } = {}) => {
  const ratio = window.devicePixelRatio || 1;
  const width = canvas.clientWidth;
  const height = canvas.clientHeight;
  if (!width || !height) return;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
  }
  const pen = canvas.getContext("2d");
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, width, height);
  pen.strokeStyle = pen.fillStyle = inkOf(canvas);
  pen.lineWidth = 1.5;
  pen.lineJoin = "round";

  const shown = values.slice(-maxValues);
  const top = ceiling || Math.max(1, ...shown.filter((value) => value !== null));
  const xOf = (i) => width - 2 - ((shown.length - 1 - i) * (width - 4)) / (maxValues - 1);
  const yOf = (value) => height - 1.5 - (Math.min(value, top) / top) * (height - 4);

  pen.globalAlpha = 0.25;
  pen.fillRect(0, height - 1, width, 1);
  for (const run of runsOf(shown)) {
    const path = new Path2D();
    run.forEach((i) => path.lineTo(xOf(i), yOf(shown[i])));
    pen.globalAlpha = 1;
    pen.stroke(path);
    path.lineTo(xOf(run.at(-1)), height - 1);
    path.lineTo(xOf(run[0]), height - 1);
    pen.globalAlpha = 0.16;
    pen.fill(path);
  }
  if (shown.length && shown.at(-1) !== null) {
    pen.globalAlpha = 1;
    pen.beginPath();
    pen.arc(xOf(shown.length - 1), yOf(shown.at(-1)), 2, 0, 2 * Math.PI);
    pen.fill();
  }
};

// The indices of known values, in unbroken runs.
const runsOf = (values) => {
  const runs = [];
  values.forEach((value, i) => {
    if (value === null) return;
    if (i === 0 || values[i - 1] === null) runs.push([]);
    runs.at(-1).push(i);
  });
  return runs;
};
