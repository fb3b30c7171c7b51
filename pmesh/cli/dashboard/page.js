// Shows what pmesh/cli/dashboard/picture.py says. Every text becomes a text node, never markup.
"use strict";

const KEPT_SLOTS = 720; // an hour of 5 s each, as history.py keeps it
const MOST_LINES = 200;
const SILENCE_MS = 15000; // a server that lives sends each second
const AGAIN_MS = 2000;
const MARKS = { self: "●", healthy: "●", degraded: "◐", suspect: "○", gone: "✕" };
const MOODS = { self: "good", healthy: "good", degraded: "warn", suspect: "bad", gone: "bad" };
const SVG = "http://www.w3.org/2000/svg";

const at = (id) => document.getElementById(id);

function filled(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children.filter((child) => child !== null)); // a string becomes a text node
  return node;
}
const html = (tag, attributes = {}, ...children) =>
  filled(document.createElement(tag), attributes, children);
const svg = (tag, attributes = {}, ...children) =>
  filled(document.createElementNS(SVG, tag), attributes, children);

// --- numbers as texts

function short(value) {
  const digits = Math.abs(value) >= 1e5 || (value !== 0 && Math.abs(value) < 1e-3);
  return digits ? value.toExponential(2) : String(Number(value.toPrecision(4)));
}
const gbit = (mbit) => (mbit === null ? "?" : String(Number((mbit / 1000).toPrecision(3))));
const percent = (value) => `${Math.round(value)} %`;

// --- the ring

function drawRing(machines) {
  const count = machines.length;
  const place = (index, width = 130, height = 95) => {
    const angle = (2 * Math.PI * index) / count - Math.PI / 2;
    return [200 + width * Math.cos(angle), 145 + height * Math.sin(angle)];
  };
  const speeds = machines.map((machine) => machine.next_mbit_s);
  const known = speeds.filter((speed) => speed !== null);
  const slowest = new Set(known).size > 1 ? Math.min(...known) : null;
  const parts = [
    svg("title", {}, "The ring of machines"),
    svg(
      "marker",
      { id: "tip", viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 5, markerHeight: 5, orient: "auto" },
      svg("path", { d: "M0 0 8 4 0 8Z" }),
    ),
  ];
  if (count > 1) {
    machines.forEach((machine, index) => {
      const gap = Math.min(0.3, 0.12 * Math.sqrt(count) / 2); // of an edge: it ends before the circles
      const points = [];
      for (let step = 0; step <= 8; step++) points.push(place(index + gap + ((1 - 2 * gap) * step) / 8));
      const d = points.map(([x, y], step) => `${step ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("");
      const kind = machine.next_mbit_s !== null && machine.next_mbit_s === slowest ? "slowest" : "edge";
      parts.push(svg("path", { d, class: kind, "marker-end": "url(#tip)" }));
      if (count <= 12 || kind === "slowest") {
        const [x, y] = place(index + 0.5, 100, 68);
        parts.push(svg("text", { x, y: y + 4, class: "speed" }, gbit(machine.next_mbit_s)));
      }
    });
  }
  machines.forEach((machine, index) => {
    const [x, y] = place(index);
    const radius = count <= 12 ? 11 : 6;
    const label = Array.from(machine.name);
    const name = label.length > 18 ? `${label.slice(0, 17).join("")}…` : machine.name;
    const below = y > 140 ? 29 : -19;
    parts.push(
      svg("g", { class: MOODS[machine.health] },
        svg("circle", { cx: x, cy: y, r: radius }),
        svg("text", { x, y: y + 5, class: "mark" }, count <= 12 ? MARKS[machine.health] : ""),
        count <= 12 ? svg("text", { x, y: y + below }, name + (machine.leads ? " ★" : "")) : null,
        svg("title", {}, machine.name)),
    );
  });
  at("ring").replaceChildren(...parts);
}

// --- machines

function machineCard(machine) {
  const facts = [];
  const tell = (what, value) => facts.push(html("div", {}, html("dt", {}, what), html("dd", {}, value)));
  if (machine.processor_percent !== null) tell("processor", percent(machine.processor_percent));
  if (machine.memory_percent !== null) tell("memory", percent(machine.memory_percent));
  if (machine.rtt_ms !== null) tell("round trip", `${machine.rtt_ms.toFixed(2)} ms`);
  if (machine.way) tell("way to it", machine.way);
  if (machine.next_mbit_s !== null) tell("to the next", `${gbit(machine.next_mbit_s)} Gbit/s`);
  if (machine.share_percent !== null) tell("share of rows", percent(machine.share_percent));
  const words = { self: "this machine", healthy: "well", degraded: "slow to answer", suspect: "silent", gone: "gone" };
  return html("li", {},
    html("b", {}, html("span", { class: MOODS[machine.health] }, `${MARKS[machine.health]} `),
      machine.name + (machine.leads ? " ★" : "")),
    html("span", { class: machine.health === "healthy" ? "dim" : MOODS[machine.health] },
      ` ${words[machine.health]}`),
    html("dl", {}, ...facts));
}

// --- jobs

function splitBar(rank) {
  const bar = html("div", { class: "bar", role: "img" });
  const words = [];
  for (const part of ["computing", "waiting", "network"]) {
    const share = rank[`${part}_percent`];
    if (share === null) continue;
    const piece = html("span", { class: part }, share >= 15 ? `${share} %` : "");
    piece.style.width = `${share}%`;
    words.push(`${part} ${share} %`);
    bar.append(piece);
  }
  bar.setAttribute("aria-label", words.join(", ") || "not known yet");
  bar.title = words.join(", ");
  for (const piece of bar.children) if (piece.style.width === "0%") piece.remove();
  return bar;
}

function rankRow(rank) {
  const reports = Object.entries(rank.reports).map(([name, value]) => `${name} ${value}`);
  const notes = [`step ${rank.step}`, ...reports, rank.remarks].filter(Boolean).join(" · ");
  const broken = Object.values(rank.reports).some((value) => !Number.isFinite(Number(value)));
  return html("div", { class: "rank" },
    html("span", {}, `${rank.rank} ${rank.machine}`), splitBar(rank), html("span", { class: broken ? "note bad" : "note" }, notes));
}

function chartOf(job, name, chart, now) {
  const { slots, values } = chart;
  const low = name.endsWith("a second") ? 0 : Math.min(...values); // half the speed is half as high
  const high = Math.max(...values);
  const x = (slot) => (300 * (slot - now + KEPT_SLOTS - 1)) / (KEPT_SLOTS - 1);
  const y = (value) => 96 - 92 * (high === low ? 0.5 : value / (high - low) - low / (high - low));
  let d = "";
  slots.forEach((slot, i) => {
    const joined = i > 0 && slot - slots[i - 1] <= 3;
    d += `${joined ? "L" : "M"}${x(slot).toFixed(1)} ${y(values[i]).toFixed(1)}`;
    if (!joined) d += "h0"; // a point alone is a dot
  });
  return html("figure", {},
    html("h3", {}, name, html("span", {}, short(values[values.length - 1]))),
    svg("svg", { viewBox: "0 0 300 100", preserveAspectRatio: "none", role: "img",
      "aria-label": `${name} of job ${job} in the last hour, from ${short(low)} to ${short(high)}` },
      svg("path", { d })),
    html("div", { class: "axis note" }, html("span", {}, "60 min ago"),
      html("span", {}, `${short(low)} to ${short(high)}`), html("span", {}, "now")));
}

function jobCard(job, charts, now) {
  const split = job.ranks.some((rank) => rank.computing_percent !== null);
  const legend = html("p", { class: "legend" },
    html("span", { class: "computing" }, "computing"),
    html("span", { class: "waiting" }, "waiting for the slowest"),
    html("span", { class: "network" }, "network"));
  return html("section", { "aria-label": `Job ${job.name}` },
    html("h2", { class: job.is_well ? "" : "bad" }, job.headline),
    job.pace ? html("p", {}, job.pace) : null,
    split ? legend : null,
    ...job.ranks.map(rankRow),
    job.newcomers.length ? html("p", { class: "note" }, `waiting to take part: ${job.newcomers.join(", ")}`) : null,
    html("div", { class: "charts" },
      ...charts.filter((chart) => chart.job === job.name)
        .sort((one, other) => other.slots.at(-1) - one.slots.at(-1)) // what has ended comes last
        .map((chart) => chartOf(job.name, chart.name, chart, now))));
}

// --- events

function eventLine(line) {
  const time = new Date(line.time);
  return html("li", {},
    html("time", { datetime: line.time, title: time.toLocaleString() }, `${time.toLocaleTimeString()} `),
    html("b", { class: line.mood }, `${line.kind} `), line.text);
}

// --- what was sent

let charts = new Map();
let lines = [];
const shown = new Map();

/** Call `draw` only if what it shows is another than before: the selection of a reader stays. */
function drawIfNew(id, data, draw) {
  const text = JSON.stringify(data);
  if (shown.get(id) === text) return;
  shown.set(id, text);
  draw();
}

function takeCharts(update) {
  if (update.whole) charts = new Map();
  for (const [job, name, slots, values] of update.charts) {
    const key = JSON.stringify([job, name]);
    const chart = charts.get(key) ?? { job, name, slots: [], values: [] };
    charts.set(key, chart);
    if (chart.slots.at(-1) === slots[0]) {
      chart.slots.pop();
      chart.values.pop();
    }
    chart.slots.push(...slots);
    chart.values.push(...values);
  }
  for (const [key, chart] of charts) {
    while (chart.slots.length && chart.slots[0] <= update.slot - KEPT_SLOTS) {
      chart.slots.shift();
      chart.values.shift();
    }
    if (!chart.slots.length) charts.delete(key);
  }
}

function show(update) {
  takeCharts(update);
  lines = (update.whole ? update.lines : [...lines, ...update.lines]).slice(-MOST_LINES);
  sayGone(update.gone);
  const { picture } = update;
  if (picture !== null) {
    const isWell = picture.is_well && picture.jobs.every((job) => job.is_well);
    document.title = `${isWell && update.gone === null ? "" : "! "}${picture.name} – pmesh`;
    at("name").textContent = picture.name;
    at("name").title = `pmesh ${picture.version}`;
    at("headline").textContent = picture.headline;
    at("headline").className = picture.is_well ? "" : "bad";
    drawIfNew("ring", picture.machines.map((one) => [one.name, one.health, one.leads, one.next_mbit_s]),
      () => drawRing(picture.machines));
    drawIfNew("machines", picture.machines,
      () => at("machines").replaceChildren(...picture.machines.map(machineCard)));
    drawIfNew("troubles", picture.troubles, () => {
      at("troubles").replaceChildren(...picture.troubles.map((text) => html("li", {}, text)));
      at("troubles").hidden = picture.troubles.length === 0;
    });
    const all = [...charts.values()];
    drawIfNew("jobs", [picture.jobs, all, update.slot],
      () => at("jobs").replaceChildren(...picture.jobs.map((job) => jobCard(job, all, update.slot))));
  }
  drawIfNew("events", lines, () => at("events").replaceChildren(...lines.map(eventLine).reverse()));
}

function sayGone(why) {
  at("gone").hidden = why === null;
  at("gone").textContent = why === null ? "" : `The agent does not answer: ${why}`;
  document.querySelector("main").classList.toggle("stale", why !== null);
}

// --- the stream

let source = null;
let lastAt = 0;

function connect() {
  source?.close();
  lastAt = Date.now();
  source = new EventSource(`updates${location.search}`); // which has the token, if there is one
  source.onmessage = (message) => {
    lastAt = Date.now();
    show(JSON.parse(message.data));
  };
  source.onerror = () => {
    source.close();
    const text = "This page gets no answer: 'pmesh dashboard' has ended, or it has another link now.";
    at("gone").hidden = false;
    at("gone").textContent = text;
    document.querySelector("main").classList.add("stale");
    setTimeout(connect, AGAIN_MS);
  };
}

setInterval(() => {
  if (source.readyState !== EventSource.CLOSED && Date.now() - lastAt > SILENCE_MS) source.onerror();
}, AGAIN_MS);
connect();
