// Steps through recorded plans. The first part computes and touches no document.
"use strict";

/** Class of a block in a frame: what the picture says of it. */
function blockClass(block) {
  const names = ["block"];
  if (block.refs > 1) names.push("shared");
  else if (block.refs === 1) names.push("used");
  else if (block.cached) names.push("cached");
  if (block.hit) names.push("hit");
  if (block.fresh) names.push("new");
  return names.join(" ");
}

/** What a block's caption says. */
function blockText(block) {
  const owners = block.owners.length ? block.owners.join(" + ") : (block.cached ? "cached" : "free");
  return `${owners} · refs ${block.refs}`;
}

/** Keeps a step number within the frames. */
function clamp(index, frames) {
  return Math.max(0, Math.min(frames.length - 1, index));
}

/** The first frame from `index + 1` on that shows something new, or the last. */
function nextKey(index, frames) {
  for (let i = index + 1; i < frames.length; i++) {
    if (frames[i].events.some(event => event.key)) return i;
  }
  return frames.length - 1;
}

if (typeof document !== "undefined") {
  const make = (tag, text, parent, className) => {
    const node = document.createElement(tag);
    if (text !== null && text !== undefined) node.textContent = text;
    if (className) node.className = className;
    if (parent) parent.appendChild(node);
    return node;
  };
  const data = JSON.parse(document.getElementById("data").textContent);
  const page = document.getElementById("page");
  make("h1", data.title, page);
  make("p", data.intro, page, "note");
  const controls = make("section", null, page);
  const first = make("button", "first", controls);
  const back = make("button", "◀ step", controls);
  const forward = make("button", "step ▶", controls);
  const key = make("button", "next event", controls);
  const play = make("button", "play", controls);
  const label = make("strong", "", controls);
  label.id = "label";
  const happened = make("section", null, page);
  make("h2", "What happened", happened);
  const events = make("ul", null, happened, "events");
  const poolBox = make("section", null, page);
  make("h2", "KV pool", poolBox);
  make("p", `Each block holds ${data.blockSize} tokens. Solid: in a table. Double: in several ` +
    "(reference count above 1). Dashed: free, but its content can still be found. Red: computed by " +
    "this step. Green halo: found in the prefix cache. Blue halo: handed out by this step.",
    poolBox, "note");
  const pool = make("div", null, poolBox, "pool");
  const counts = make("p", "", poolBox);
  const tables = make("section", null, page);
  make("h2", "Requests and block tables", tables);
  const list = make("div", null, tables);
  let index = 0;
  let timer = null;

  const drawBlock = (block, number) => {
    const node = make("div", null, pool, blockClass(block));
    node.dataset.block = number;
    node.dataset.refs = block.refs;
    make("strong", `block ${number}`, node);
    make("br", null, node);
    make("small", blockText(block), node);
    const slots = make("div", null, node, "slots");
    block.tokens.forEach((token, i) => {
      const names = token === null ? "" : (block.now.includes(i) ? "filled now" : "filled");
      make("u", token === null ? "" : token, slots, names);
    });
  };

  const drawSequence = seq => {
    const node = make("div", null, list, `seq ${seq.status}`);
    node.dataset.name = seq.name;
    const share = seq.scheduled ? `, this step computes ${seq.scheduled}` : "";
    make("strong", `${seq.name} `, node);
    make("span", `${seq.status}: ${seq.computed} of ${seq.tokens} tokens computed before${share}` +
      (seq.reason ? ` (${seq.reason})` : ""), node);
    make("br", null, node);
    make("code", `block table [${seq.table.join(", ")}]`, node);
  };

  const draw = () => {
    const frame = data.frames[index];
    label.textContent = ` step ${frame.step} (${index + 1} of ${data.frames.length}), ` +
      `${frame.used} of ${data.budget} tokens of the budget`;
    for (const node of [events, pool, list]) node.textContent = "";
    for (const event of frame.events) make("li", event.text, events, event.key ? "key" : "");
    frame.blocks.forEach(drawBlock);
    frame.sequences.forEach(drawSequence);
    counts.textContent = `${frame.free} of ${frame.blocks.length} blocks are free`;
    back.disabled = first.disabled = index === 0;
    forward.disabled = key.disabled = index === data.frames.length - 1;
    document.body.dataset.index = index;
  };
  const go = to => { index = clamp(to, data.frames); draw(); };
  const stop = () => { clearInterval(timer); timer = null; play.textContent = "play"; };
  first.onclick = () => go(0);
  back.onclick = () => go(index - 1);
  forward.onclick = () => go(index + 1);
  key.onclick = () => go(nextKey(index, data.frames));
  play.onclick = () => {
    if (timer) { stop(); return; }
    play.textContent = "pause";
    timer = setInterval(() => {
      if (index === data.frames.length - 1) stop(); else go(index + 1);
    }, 1200);
  };
  document.addEventListener("keydown", event => {
    if (event.key === "ArrowRight") go(index + 1);
    if (event.key === "ArrowLeft") go(index - 1);
  });
  draw();
  document.body.dataset.ready = "yes";
}

if (typeof module !== "undefined") {
  module.exports = { blockClass, blockText, clamp, nextKey };
}
