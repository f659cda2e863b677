// Draws a report. The first part computes and touches no document, so that it runs anywhere.
"use strict";

const KIND_COLOURS = ["#d9d9d9", "#4e79a7", "#59a14f", "#edc948", "#e15759", "#b07aa1"];
const KIND_NAMES = ["waiting", "prompt chunk", "decode up to 25 ms", "decode up to 50 ms",
  "decode above 50 ms", "preempted"];
const BLOCK_COLOURS = ["#eceff2", "#e9cf8e", "#4e79a7", "#2f8f46"];
const BLOCK_NAMES = ["free", "free, content cached", "used", "used by several"];
const RUN_COLOURS = ["#4e79a7", "#e15759", "#59a14f", "#b07aa1", "#f28e2b", "#76b7b2", "#9c755f",
  "#edc948"];
const LANE = 14;

/** Formats seconds for people. */
function seconds(value) {
  if (value === null || value === undefined) return "-";
  if (Math.abs(value) >= 10) return value.toFixed(1) + " s";
  return (1000 * value).toFixed(Math.abs(value) < 0.1 ? 2 : 0) + " ms";
}

/** The index of the last row whose first entry is at most `time`; -1 if there is none. */
function lastBefore(rows, time) {
  let low = 0, high = rows.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (rows[middle][0] <= time) low = middle + 1; else high = middle;
  }
  return low - 1;
}

/** States of all blocks after step number `index` of the block map. */
function blockStates(run, index) {
  const states = new Array(run.numBlocks).fill(0);
  for (let step = 0; step <= index; step++) {
    for (const [block, state] of run.blocks[step].change) states[block] = state;
  }
  return states;
}

/** Says what a lane shows at a time: the text of the tip, or null. */
function describe(lane, time) {
  const place = lastBefore(lane.segments, time);
  const head = `request ${lane.id}: ${lane.prompt} prompt tokens` + (lane.user ? `, ${lane.user}` : "");
  if (place < 0) return null;
  const [start, end, kind, text, cached] = lane.segments[place];
  if (time > end) {
    if (lane.end !== null && time >= lane.end) return null;
    return head;
  }
  const lines = [head, `${KIND_NAMES[kind]}, ${seconds(end - start)}: ${text}`];
  if (cached) lines.push(`${cached} tokens were found in the prefix cache`);
  if (lane.message) lines.push(lane.message);
  if (lane.deadline !== null && lane.end !== null && lane.end > lane.deadline) {
    lines.push("missed its deadline");
  }
  return lines.join("\n");
}

/** Says what the strips show at a time. */
function describeStep(run, time) {
  const place = lastBefore(run.steps, time);
  if (place < 0) return null;
  const [start, end, decodes, others, found, used, free, waiting, preempted, cached] =
    run.steps[place];
  if (time > end) return "idle";
  const size = Math.ceil(run.numSteps / run.steps.length);
  const name = size === 1 ? `step ${place}` : `steps ${place * size} to ${(place + 1) * size - 1}`;
  return [`${name}, ${seconds(end - start)}`,
    `${decodes} decode and ${others} prompt tokens of ${run.budget}, ${found} found in the cache`,
    `${used} blocks used, ${free} free (${cached} of them cached), ${waiting} waiting` +
      (preempted ? `, ${preempted} preempted` : "")].join("\n");
}

/** The span of time that all lanes and steps of a run cover. */
function extent(run) {
  let end = 1e-9;
  for (const step of run.steps) end = Math.max(end, step[1]);
  for (const lane of run.lanes) for (const s of lane.segments) end = Math.max(end, s[1]);
  return [0, end];
}

if (typeof document !== "undefined") {
  const make = (tag, text, parent, attributes) => {
    const node = document.createElement(tag);
    if (text !== null && text !== undefined) node.textContent = text;
    Object.assign(node, attributes || {});
    if (parent) parent.appendChild(node);
    return node;
  };

  const data = JSON.parse(document.getElementById("data").textContent);
  const page = document.getElementById("page");
  const tip = make("div", "", document.body, { id: "tip" });

  const showTip = (event, text) => {
    tip.style.display = text ? "block" : "none";
    tip.textContent = text || "";
    tip.style.left = Math.min(event.clientX + 14, window.innerWidth - 370) + "px";
    tip.style.top = event.clientY + 14 + "px";
  };

  const canvasIn = (parent, height) => {
    const canvas = make("canvas", null, parent);
    const scale = window.devicePixelRatio || 1;
    const width = Math.max(300, parent.clientWidth - 30);
    canvas.width = width * scale;
    canvas.height = height * scale;
    canvas.style.height = height + "px";
    const context = canvas.getContext("2d");
    context.scale(scale, scale);
    return { canvas, context, width, height };
  };

  const table = (parent, rows, head) => {
    const node = make("table", null, parent);
    if (head) {
      const line = make("tr", null, node);
      for (const cell of head) make("th", cell, line);
    }
    for (const row of rows) {
      const line = make("tr", null, node);
      for (const cell of row) make("td", cell, line);
    }
    return node;
  };

  const legend = (parent, names, colours) => {
    const node = make("p", null, parent, { className: "legend" });
    names.forEach((name, i) => {
      const item = make("span", null, node);
      make("i", null, item).style.background = colours[i];
      item.appendChild(document.createTextNode(name));
    });
  };

  const drawMetrics = () => {
    const section = make("section", null, page);
    make("h2", "Metrics", section);
    const names = [];
    for (const run of data.runs) for (const [name] of run.metrics) {
      if (!names.includes(name)) names.push(name);
    }
    const columns = data.runs.map(run => Object.fromEntries(run.metrics));
    const rows = names.map(name => [name, ...columns.map(column => column[name] || "-")]);
    table(section, rows, data.runs.length > 1 ? ["", ...data.runs.map(r => r.name)] : null);
    make("p", data.definitions, section, { className: "note" });
    const facts = data.runs[0].facts.map((fact, i) =>
      [fact[0], ...data.runs.map(run => run.facts[i][1])]);
    make("h2", "Setting", section);
    table(section, facts);
  };

  const drawBars = () => {
    if (data.runs.length < 2) return;
    const section = make("section", null, page);
    make("h2", "Comparison", section);
    const row = make("div", null, section, { className: "row" });
    data.runs[0].bars.forEach(([name], i) => {
      const box = make("div", null, row);
      box.style.width = "360px";
      make("strong", name, box);
      const top = Math.max(...data.runs.map(run => run.bars[i][1]), 1e-12);
      data.runs.forEach((run, j) => {
        const bar = make("div", null, box, { className: "bar" });
        make("b", run.name, bar);
        const fill = make("i", null, bar);
        fill.style.width = 130 * run.bars[i][1] / top + "px";
        fill.style.background = RUN_COLOURS[j % RUN_COLOURS.length];
        make("span", run.bars[i][2], bar);
      });
    });
  };

  const drawCdf = (parent, name) => {
    const box = make("figure", null, parent);
    box.style.cssText = "margin:0;width:380px";
    make("strong", name, box);
    const { canvas, context, width, height } = canvasIn(box, 190);
    const left = 34, bottom = height - 20, right = width - 8;
    const top = Math.max(...data.runs.map(run => {
      const points = run.cdfs[name];
      return points.length ? points[points.length - 1][0] : 0;
    }), 1e-9);
    const x = value => left + (right - left) * value / top;
    const y = share => bottom - (bottom - 8) * share;
    context.font = "11px sans-serif";
    context.fillStyle = "#5b6570";
    context.strokeStyle = "#cfd4da";
    for (const share of [0, 0.5, 0.9, 1]) {
      context.beginPath(); context.moveTo(left, y(share)); context.lineTo(right, y(share)); context.stroke();
      context.fillText(share, 6, y(share) + 4);
    }
    context.fillText("0", left, height - 6);
    context.fillText(seconds(top), right - 44, height - 6);
    data.runs.forEach((run, j) => {
      context.strokeStyle = RUN_COLOURS[j % RUN_COLOURS.length];
      context.lineWidth = 1.5;
      context.beginPath();
      run.cdfs[name].forEach(([value, share], i) =>
        i ? context.lineTo(x(value), y(share)) : context.moveTo(x(value), y(share)));
      context.stroke();
    });
    canvas.onmousemove = event => {
      const value = top * (event.offsetX - left) / (right - left);
      const lines = data.runs.map(run => {
        const place = lastBefore(run.cdfs[name], value);
        return `${run.name}: ${place < 0 ? 0 : (100 * run.cdfs[name][place][1]).toFixed(1)} % within ${seconds(value)}`;
      });
      showTip(event, value >= 0 ? lines.join("\n") : null);
    };
    canvas.onmouseleave = event => showTip(event, null);
  };

  const drawCdfs = () => {
    const section = make("section", null, page);
    make("h2", "Distributions", section);
    if (data.runs.length > 1) legend(section, data.runs.map(r => r.name), RUN_COLOURS);
    const row = make("div", null, section, { className: "row" });
    for (const name of Object.keys(data.runs[0].cdfs)) drawCdf(row, name);
  };

  const drawTimeline = run => {
    const section = make("section", null, page, { className: "timeline" });
    make("h2", data.runs.length > 1 ? `Timeline of ${run.name}` : "Timeline", section);
    legend(section, KIND_NAMES, KIND_COLOURS);
    if (run.lanes.length < run.numRequests) {
      make("p", `The first ${run.lanes.length} of ${run.numRequests} requests are shown.`, section,
        { className: "note" });
    }
    if (run.steps.length < run.numSteps) {
      make("p", `${run.numSteps} steps are drawn as ${run.steps.length} bars, each the greatest of ` +
        "several.", section, { className: "note" });
    }
    const bar = make("p", null, section);
    const [first, last] = extent(run);
    let from = first, to = last;
    const strip = 54;
    const height = run.lanes.length * LANE + 3 * strip + 30;
    const { canvas, context, width } = canvasIn(section, height);
    const left = 70;
    const x = time => left + (width - left) * (time - from) / (to - from);
    const timeAt = pixel => from + (to - from) * (pixel - left) / (width - left);
    const stripTop = i => run.lanes.length * LANE + 12 + i * strip;

    const drawStrip = (index, name, top, series) => {
      const base = stripTop(index) + strip - 8;
      context.fillStyle = "#5b6570";
      context.fillText(name, 2, base - 18);
      context.fillText(top, 2, base - 4);
      for (const step of run.steps) {
        if (step[1] < from || step[0] > to) continue;
        let sum = 0;
        const w = Math.max(1, x(step[1]) - x(step[0]));
        for (const [value, colour] of series(step)) {
          const h = (strip - 14) * value / top;
          context.fillStyle = colour;
          context.fillRect(x(step[0]), base - sum - h, w, h);
          sum += h;
        }
      }
      context.strokeStyle = "#cfd4da";
      context.strokeRect(left, stripTop(index) + 6, width - left, strip - 14);
    };

    const draw = () => {
      context.clearRect(0, 0, width, height);
      context.font = "11px sans-serif";
      context.save();
      context.beginPath(); context.rect(left, 0, width - left, height); context.clip();
      run.lanes.forEach((lane, row) => {
        const y = row * LANE;
        for (const [start, end, kind, , cached] of lane.segments) {
          if (end < from || start > to) continue;
          context.fillStyle = KIND_COLOURS[kind];
          context.fillRect(x(start), y + 2, Math.max(1, x(end) - x(start)), LANE - 4);
          if (cached) {
            context.fillStyle = "#e9a11a";
            context.fillRect(x(start), y + 1, 3, LANE - 2);
          }
        }
        context.fillStyle = "#000";
        if (lane.reason === "error" && lane.end !== null) context.fillText("×", x(lane.end), y + LANE - 3);
        if (lane.deadline !== null && lane.end !== null && lane.end > lane.deadline) {
          context.fillRect(x(lane.deadline), y, 1, LANE);
        }
      });
      context.restore();
      context.fillStyle = "#5b6570";
      const every = Math.max(1, Math.ceil(run.lanes.length / 40));
      run.lanes.forEach((lane, row) => {
        if (row % every === 0) context.fillText(String(lane.id).slice(0, 9), 2, row * LANE + LANE - 3);
      });
      const queue = Math.max(1, ...run.steps.map(step => step[7]));
      drawStrip(0, "tokens", run.budget, s => [[s[2], KIND_COLOURS[2]], [s[3], KIND_COLOURS[1]]]);
      drawStrip(1, "blocks", run.numBlocks, s => [[s[5], BLOCK_COLOURS[2]], [s[9], BLOCK_COLOURS[1]]]);
      drawStrip(2, "queue", queue, s => [[s[7], KIND_COLOURS[5]]]);
      context.fillStyle = "#5b6570";
      context.fillText(seconds(from), left, height - 4);
      context.fillText(seconds(to), width - 50, height - 4);
    };

    const zoom = (factor, around) => {
      const centre = around === undefined ? (from + to) / 2 : around;
      const span = Math.min(last - first, Math.max((to - from) * factor, (last - first) / 5000));
      const share = (centre - from) / (to - from);
      from = Math.max(first, Math.min(centre - share * span, last - span));
      to = from + span;
      draw();
    };
    const pan = share => {
      const span = to - from;
      from = Math.max(first, Math.min(from + share * span, last - span));
      to = from + span;
      draw();
    };
    for (const [text, act] of [["+", () => zoom(0.5)], ["−", () => zoom(2)], ["◀", () => pan(-0.5)],
      ["▶", () => pan(0.5)], ["all", () => zoom(1e9)]]) {
      make("button", text, bar, { onclick: act });
    }
    make("span", "Wheel: zoom. Hover: what happened, and why a request waited.", bar);
    canvas.addEventListener("wheel", event => {
      event.preventDefault();
      zoom(event.deltaY > 0 ? 1.25 : 0.8, timeAt(event.offsetX));
    }, { passive: false });
    canvas.onmousemove = event => {
      const lane = run.lanes[Math.floor(event.offsetY / LANE)];
      const time = timeAt(event.offsetX);
      showTip(event, lane ? describe(lane, time) : describeStep(run, time));
    };
    canvas.onmouseleave = event => showTip(event, null);
    draw();
  };

  const drawBlocks = run => {
    if (!run.blocks || !run.blocks.length) return;
    const section = make("section", null, page, { className: "blockmap" });
    make("h2", data.runs.length > 1 ? `Block map of ${run.name}` : "Block map", section);
    legend(section, [...BLOCK_NAMES, "found by this step"], [...BLOCK_COLOURS, "#e15759"]);
    const bar = make("p", null, section);
    const slider = make("input", null, bar,
      { type: "range", min: 0, max: run.blocks.length - 1, value: 0 });
    slider.style.width = "60%";
    const label = make("span", "", bar);
    const size = run.numBlocks > 2000 ? 8 : 14;
    const perRow = Math.floor((section.clientWidth - 30) / size);
    const { canvas, context, width, height } =
      canvasIn(section, Math.ceil(run.numBlocks / perRow) * size);
    let states = [];
    const draw = () => {
      const index = Number(slider.value);
      const step = run.blocks[index];
      const hits = new Set(step.hits);
      states = blockStates(run, index);
      const count = state => states.filter(s => s === state).length;
      label.textContent = ` step ${step.step}: ${count(2) + count(3)} used, ${count(3)} of them ` +
        `shared, ${count(1)} cached, ${count(0)} free, ${hits.size} found`;
      context.clearRect(0, 0, width, height);
      states.forEach((state, block) => {
        const x = (block % perRow) * size, y = Math.floor(block / perRow) * size;
        context.fillStyle = BLOCK_COLOURS[state];
        context.fillRect(x, y, size - 1, size - 1);
        if (hits.has(block)) {
          context.strokeStyle = "#e15759";
          context.strokeRect(x + 0.5, y + 0.5, size - 2, size - 2);
        }
      });
    };
    slider.oninput = draw;
    canvas.onmousemove = event => {
      const block = Math.floor(event.offsetY / size) * perRow + Math.floor(event.offsetX / size);
      showTip(event, block < run.numBlocks ? `block ${block}: ${BLOCK_NAMES[states[block]]}` : null);
    };
    canvas.onmouseleave = event => showTip(event, null);
    draw();
  };

  make("h1", data.title, page);
  drawMetrics();
  drawBars();
  drawCdfs();
  for (const run of data.runs) {
    drawTimeline(run);
    drawBlocks(run);
  }
  document.body.dataset.ready = "yes";
}

if (typeof module !== "undefined") {
  module.exports = { seconds, lastBefore, blockStates, describe, describeStep, extent };
}
