"use strict";
// Looks answers up, or asks the server for them; draws; steps. No number is computed here.
const DATA = JSON.parse(document.getElementById("data").textContent);
const PANELS = DATA.panels;
const CALM = matchMedia("(prefers-reduced-motion: reduce)").matches;
const state = {};
const shown = {};  // panel: its elements
const steps = {};  // panel: the step that is shown
const touched = {};  // panel: the input that was set last
const answers = {};  // panel: what it shows now

const one = (kind, attributes = {}, ...inside) => fill(document.createElement(kind), attributes, inside);
const svg = (kind, attributes = {}, ...inside) =>
  fill(document.createElementNS("http://www.w3.org/2000/svg", kind), attributes, inside);
function fill(element, attributes, inside) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value);
  }
  element.append(...inside);
  return element;
}

// --- how numbers are written ---

function text(value) {
  if (value === null || value === undefined) return "–";
  if (Array.isArray(value)) return value.map(short).join(" ");
  if (typeof value !== "number") return String(value);
  return Number.isInteger(value) ? value.toLocaleString("en-US") : String(value);
}
const short = x => (typeof x === "number" ? String(Number(x.toPrecision(4))) : x);
function size(bytes) {
  for (const [unit, of] of [["TB", 1e12], ["GB", 1e9], ["MB", 1e6], ["kB", 1e3]])
    if (bytes >= of) return `${Number((bytes / of).toPrecision(3))} ${unit}`;
  return `${bytes} B`;
}

// --- answers ---

function valueOf(name, chosen, [over, values, at]) {
  const axes = Object.entries(PANELS[name].axes);
  const places = axes.map(([axis, { values }]) => values.findIndex(v => String(v) === chosen[axis]));
  return values[at[over.reduce((sum, n) => sum * axes[n][1].values.length + places[n], 0)]];
}
function lookup(name, chosen) {
  const found = {};
  for (const [key, entry] of Object.entries(PANELS[name].table)) {
    const value = valueOf(name, chosen, entry);
    if (value !== undefined && !(key.endsWith("refused") && value === "")) found[key] = value;
  }
  return found.refused ? { refused: found.refused } : found;
}

// The inputs to change, as few as can be and not the last one set, for a state that has an answer.
function nearest(name) {
  const { axes, table } = PANELS[name], now = state[name];
  let states = [{}];
  for (const [axis, { values }] of Object.entries(axes))
    states = states.flatMap(some => (axis === touched[name] ? [now[axis]] : values.map(String))
      .map(value => (value === now[axis] ? some : { ...some, [axis]: value })));
  states.sort((a, b) => Object.keys(a).length - Object.keys(b).length);
  return states.find(some => !valueOf(name, { ...now, ...some }, table.refused));
}

async function answer(name) {
  if (!DATA.live) return lookup(name, state[name]);
  const asked = shown[name].asked = new AbortController();
  return (await fetch(`api/${name}?${new URLSearchParams(state[name])}`, { signal: asked.signal })).json();
}

// --- inputs and the address ---

function start() {
  for (const [name, panel] of Object.entries(PANELS)) {
    delete steps[name];
    state[name] = {};
    for (const [axis, { first }] of Object.entries(panel.axes)) state[name][axis] = String(first);
  }
}

// A link names the panel that was looked at, then all inputs of those that are not as the page begins.
function fromAddress() {
  start();
  for (const [key, value] of new URLSearchParams(location.hash.slice(1))) {
    const [name, axis] = key.split(".");
    if (axis === "step" && PANELS[name] && /^\d{1,6}$/.test(value)) steps[name] = Number(value);
    const known = PANELS[name] && PANELS[name].axes[axis];
    if (!known) continue;
    const listed = known.values.some(v => String(v) === value);
    const free = DATA.live && (known.text || known.least !== null || value in known.words);
    if (listed || free) state[name][axis] = value;
  }
}

function toAddress(name) {
  const parts = [];
  for (const [each, panel] of Object.entries(PANELS)) {
    const chosen = Object.entries(state[each] || {});
    if (steps[each] || chosen.some(([axis, value]) => value !== String(panel.axes[axis].first)))
      parts.push(...chosen.map(([axis, value]) => [`${each}.${axis}`, value]));
    if (steps[each]) parts.push([`${each}.step`, steps[each]]);
  }
  history.replaceState(null, "", `#${[name, ...parts.map(part => new URLSearchParams([part]))].join("&")}`);
}

function goTo(name) {
  document.getElementById(name).scrollIntoView();
  document.getElementById(`${name}-title`).focus({ preventScroll: true });
}
function showLinked() {
  const [first] = new URLSearchParams(location.hash.slice(1)).keys();
  const name = first && first.split(".")[0];
  if (PANELS[name]) goTo(name);
}

function change(name, some) {
  Object.assign(state[name], some);
  steps[name] = 0;
  toAddress(name);
  update(name);
}

function input(name, axis) {
  const { label, values, words, least, most, text: free } = PANELS[name].axes[axis];
  const id = `${name}-${axis}`;
  const now = () => state[name][axis];
  const set = value => change(name, { [touched[name] = axis]: String(value) });
  const choice = value => words[value] || String(value);
  if (free && !DATA.live && values.length < 2) return null;
  if (free && DATA.live) {
    const box = one("input", { type: "text", id, maxlength: 400, onchange: e => {
      if (PANELS[name].axes.example) state[name].example = "own";
      set(e.target.value);
    } });
    shown[name].sync.push(() => { box.value = now(); });
    return one("label", { class: values.length < 2 ? "wide" : "", for: id }, label, box);
  }
  if (DATA.live && least !== null) {
    const box = one("input", { type: "number", id, min: least, max: most, step: 1, onchange: e => set(e.target.value) });
    const slide = one("input", {
      type: "range", min: least, max: Math.min(most, 2 * values[values.length - 1] || 64), "aria-label": label,
      oninput: e => set(e.target.value),
    });
    shown[name].sync.push(() => { box.value = now(); slide.value = now(); });
    return one("label", { for: id }, label, box, slide);
  }
  if (values.length > 2 && values.every(v => typeof v === "number")) {
    const out = one("output", { for: id });
    const slide = one("input", {
      type: "range", id, min: 0, max: values.length - 1, oninput: e => set(values[e.target.value]),
    });
    shown[name].sync.push(() => {
      const at = values.findIndex(v => String(v) === now());
      slide.value = at;
      slide.setAttribute("aria-valuetext", choice(values[at]));
      out.textContent = text(values[at]);
    });
    return one("label", { for: id }, one("span", {}, `${label}: `, out), slide);
  }
  const every = DATA.live ? [...new Set([...values.map(String), ...Object.keys(words)])] : values;
  const box = one("select", { id, onchange: e => set(e.target.value) },
    ...every.map(v => one("option", { value: v }, choice(v))));
  shown[name].sync.push(() => { box.value = now(); });
  return one("label", { for: id }, label, box);
}

// --- what every panel has ---

function build(name) {
  const panel = PANELS[name];
  const parts = shown[name] = { sync: [], view: one("div", { class: "view" }), table: one("div", { class: "scroll" }) };
  parts.said = one("p", { class: "said", "aria-live": "polite" });
  const inputs = Object.keys(panel.axes).map(axis => input(name, axis)).filter(Boolean);
  if (name === "orders" && DATA.live) {
    parts.run = one("button", { type: "button", onclick: () => draw(name) }, "Run on the emulator");
    inputs.push(parts.run);
  }
  document.querySelector("nav").append(one("a", { href: `#${name}`, onclick: e => {
    e.preventDefault();
    toAddress(name);
    goTo(name);
  } }, panel.title));
  const here = () => toAddress(name);
  document.querySelector("main").append(one("section", { id: name, "aria-labelledby": `${name}-title`, onclick: here, onfocusin: here },
    one("h2", { id: `${name}-title`, tabindex: -1 }, panel.title),
    one("p", { class: "question" }, panel.question), one("p", { class: "sentence" }, panel.sentence),
    one("form", { class: "inputs", onsubmit: e => e.preventDefault() }, ...inputs),
    parts.said, parts.view, parts.table, one("p", { class: "note" }, panel.note)));
}

async function update(name) {
  shown[name].sync.forEach(sync => sync());
  if (shown[name].run && answers[name]) say(name, "Press Run. The page still shows the previous run.");
  else await draw(name);
}

const failed = error => error.name === "AbortError" ? null : { refused: `The server did not answer: ${error.message}` };
function say(name, words, bad = false) {
  shown[name].said.textContent = words;
  shown[name].said.classList.toggle("bad", bad);
}

async function draw(name) {
  if (shown[name].asked) shown[name].asked.abort();
  const parts = shown[name];
  if (DATA.live && name === "orders") say(name, "The emulator is running ...");
  const now = await answer(name).catch(failed);
  if (!now) return;
  if (parts.stop) parts.stop();
  answers[name] = now;
  say(name, now.refused || "", Boolean(now.refused));
  parts.view.replaceChildren();
  parts.table.replaceChildren();
  if (now.refused) {
    if (!DATA.live) offer(parts, name);
    return;
  }
  (VIEWS[name] || (() => {}))(parts, now, name);
  parts.table.append(numbers(name, now));
  if (document.body.dataset.ready && !parts.said.textContent) say(name, summary(name, now));
}

// What a change did, for those who do not see the table: its first row.
function summary(name, now) {
  const { columns, rows } = PANELS[name];
  const [key, label] = rows[0];
  return `${label}: ${columns.map(([column, words]) =>
    `${words.split(" (")[0]} ${now[`${column}.refused`] ? "none" : text(now[`${column}.${key}`])}`).join(", ")}.`;
}

// A page without a server has not all answers: what it takes to come to one.
function offer(parts, name) {
  const some = nearest(name);
  if (!some) return;
  const { axes } = PANELS[name], words = Object.entries(some).map(([axis, value]) =>
    `${axes[axis].label.split(",")[0]} ${axes[axis].words[value] || value}`);
  parts.view.append(one("button", { type: "button", onclick: () => {
    change(name, some);
    document.getElementById(`${name}-${Object.keys(some)[0]}`).focus();
  } }, `Show the nearest stored setting: ${words.join("; ")}`));
}

function numbers(name, now) {
  const { columns, rows, title } = PANELS[name];
  const body = rows.map(([key, label], n) => one("tr", {}, one("th", { scope: "row" }, label),
    ...columns.flatMap(([column]) => {
      const refused = now[`${column}.refused`];
      if (refused) return n ? [] : [one("td", { class: "words bad", rowspan: rows.length, "data-key": `${column}.refused` }, refused)];
      const words = key.startsWith("why") ? "words" : "";
      return [one("td", { class: words, "data-key": `${column}.${key}` }, text(now[`${column}.${key}`]))];
    })));
  return one("table", { "aria-label": title },
    one("thead", {}, one("tr", {}, one("td"), ...columns.map(([, label]) => one("th", { scope: "col" }, label)))),
    one("tbody", {}, ...body));
}

// Steps from 0 to `last`: buttons, a slider, keys; `show` draws one and gives the words for it.
function transport(parts, name, last, show) {
  let at = 0, timer = null;
  const slide = one("input", { type: "range", min: 0, max: last, value: 0, "aria-label": "step", oninput: e => go(Number(e.target.value)) });
  const play = one("button", { type: "button", onclick: () => (timer ? stop() : run()) }, "Play");
  function go(to) {
    at = Math.max(0, Math.min(last, to));
    slide.value = at;
    const words = show(at);
    slide.setAttribute("aria-valuetext", `step ${at + 1} of ${last + 1}`);
    say(name, `Step ${at + 1} of ${last + 1}. ${words}`);
    if (at !== (steps[name] || 0)) {
      steps[name] = at;
      if (!timer) toAddress(name);
    }
    if (at === last) stop();
  }
  function run() {
    if (at === last) go(0);
    play.textContent = "Pause";
    timer = setInterval(() => go(at + 1), CALM ? 1500 : last > 60 ? 140 : 500);
  }
  function stop() {
    if (timer) {
      clearInterval(timer);
      toAddress(name);
    }
    timer = null;
    play.textContent = "Play";
  }
  parts.stop = stop;
  const button = (label, move) => one("button", { type: "button", onclick: () => { stop(); go(move()); } }, label);
  const bar = one("div", { class: "transport", role: "group", "aria-label": "steps" },
    button("First", () => 0), button("Back", () => at - 1), play, button("Step", () => at + 1),
    button("Last", () => last), slide);
  bar.addEventListener("keydown", e => {
    if (e.target === slide) return;
    const move = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: last }[e.key];
    if (move === undefined) return;
    e.preventDefault();
    stop();
    go(move);
  });
  return { bar, go };
}

// --- the panels ---

const KINDS = [["load", "load of Q, K or V"], ["again", "load of O, l or m"],
  ["store", "store of O, l, m or L"], ["shared", "held in shared memory"], ["registers", "held in registers"],
  ["seen", "tile of S: computed"], ["now", "tile of S: being computed"]];
const ON_CHIP = "OlmL";

function side(name, now) {
  const { Tr, Tc } = now, wide = name === "fa1" ? ["O", "l", "m"] : ["O", "L"];
  const S = 190, x0 = 74, y0 = 92, tiles = {};
  const picture = svg("svg", { viewBox: "0 0 400 300", role: "img", "aria-label": "tiles of the matrices" });
  const tile = (key, x, y, w, h) => {
    tiles[key] = svg("rect", { x, y, width: w, height: h, class: "tile" });
    picture.append(tiles[key]);
  };
  const label = (x, y, words, kind = "") => picture.append(svg("text", { x, y, "text-anchor": "middle", class: kind }, words));
  const h = S / Tr, w = S / Tc;
  for (let i = 0; i < Tr; i++) tile(`Q${i}`, 20, y0 + i * h, 42, h);
  for (let j = 0; j < Tc; j++) { tile(`K${j}`, x0 + j * w, 18, w, 28); tile(`V${j}`, x0 + j * w, 52, w, 28); }
  for (let i = 0; i < Tr; i++) for (let j = 0; j < Tc; j++) tile(`S${i},${j}`, x0 + j * w, y0 + i * h, w, h);
  const places = { O: [276, 42], l: [330, 14], m: [352, 14], L: [330, 14] };
  for (const array of wide) for (let i = 0; i < Tr; i++) tile(`${array}${i}`, places[array][0], y0 + i * h, places[array][1], h);
  label(41, y0 - 6, "Q");
  label(x0 - 10, 37, "K");
  label(x0 - 10, 71, "V");
  label(x0 + S / 2, y0 + S + 14, "S in tiles (never in global memory)", "quiet");
  for (const array of wide) label(places[array][0] + places[array][1] / 2, y0 - 6, array);
  const visited = now[`${name}.steps`].map(step => step.split("|")[2]);
  const every = new Set(visited);
  for (const key of Object.keys(tiles)) if (key[0] === "S" && !every.has(key.slice(1))) tiles[key].classList.add("never");
  const lines = DATA.algorithms[name].map(([words, of]) => [one("span", {}, words || " "), of]);
  const listing = one("pre", { tabindex: 0, "aria-label": "the algorithm" }, ...lines.map(([line]) => line));
  const total = one("strong", { "data-key": `${name}.now` }), block = one("span");
  const head = one("h3", {}, PANELS.orders.columns.find(([key]) => key === name)[1], ": ", total, " bytes ", block);
  let lit = [];
  const show = at => {
    const steps = now[`${name}.steps`], done = at >= steps.length;
    const [moves, held, visit, of, number] = done ? ["", "", "", "", ""] : steps[at].split("|");
    for (const key of lit) tiles[key].classList.remove("load", "again", "store", "shared", "registers", "now");
    lit = [];
    const mark = (key, kind) => {
      if (!tiles[key]) return;
      tiles[key].classList.add(kind);
      lit.push(key);
    };
    for (const key of held.split(" ").filter(Boolean)) mark(key, ON_CHIP.includes(key[0]) ? "registers" : "shared");
    for (const move of moves.split(" ").filter(Boolean)) {
      const key = move.slice(1);
      mark(key, move[0] === ">" ? "store" : ON_CHIP.includes(key[0]) ? "again" : "load");
    }
    const before = new Set(visited.slice(0, at));
    for (const key of every) if (key) tiles[`S${key}`].classList.toggle("seen", before.has(key) && key !== visit);
    if (visit) mark(`S${visit}`, "now");
    const current = of.split(",").map(Number);
    for (const [line, numbers] of lines) line.classList.toggle("lit", !done && numbers.some(n => current.includes(n)));
    const first = listing.querySelector(".lit");
    if (first) listing.scrollTop = first.offsetTop - listing.offsetTop - listing.clientHeight / 3;
    const moved = now[`${name}.bytes`][Math.min(at, steps.length - 1)];
    total.textContent = text(moved);
    block.textContent = done ? "(finished)" : `(thread block ${number})`;
    const words = moves.split(" ").filter(Boolean).map(m => (m[0] === ">" ? "stores " : "loads ") + m.slice(1)).join(", ");
    return `${name === "fa1" ? "FA-1" : "FA-2"} ${words || "has ended"}, ${text(moved)} bytes so far.`;
  };
  return { element: one("div", {}, head, picture, listing), show };
}

// Both clocks are bytes: the next step is of whichever begins its next move first.
function together(a, b) {
  const found = [[0, 0]];
  let [i, j] = [0, 0];
  while (i < a.length || j < b.length) {
    const next = Math.min(i < a.length ? a[i] : Infinity, j < b.length ? b[j] : Infinity);
    if (a[i] === next) i++;
    if (b[j] === next) j++;
    found.push([i, j]);
  }
  return found;
}

const VIEWS = {
  orders(parts, now, name) {
    const sides = ["fa1", "fa2"].map(each => side(each, now));
    const at = together(now["fa1.bytes"], now["fa2.bytes"]);
    const { bar, go } = transport(parts, name, at.length - 1, n => sides.map((s, k) => s.show(at[n][k])).join(" "));
    const legend = one("div", { class: "legend" }, ...KINDS.map(([kind, words]) =>
      one("span", {}, one("i", { style: `background: var(--${{ load: "input", store: "written" }[kind] || kind})` }), words)));
    parts.view.append(bar, legend, one("div", { class: "sides" }, ...sides.map(s => s.element)));
    go(steps[name] || 0);
  },

  softmax(parts, now, name) {
    const fields = [["m", "m"], ["l", "l"], ["factor", "factor"], ["P", "P"], ["O", "O"]];
    const last = now["fa1.steps"].length - 1;
    const scores = now["fa2.steps"].flatMap((step, j) => step.S.map(x => one("span", { "data-tile": j }, short(x))));
    const bodies = { fa1: one("tbody"), fa2: one("tbody") };
    const table = (key, title, means) => one("div", {}, one("h3", {}, title), one("p", { class: "note" }, means),
      one("div", { class: "scroll" }, one("table", { "aria-label": title }, one("thead", {}, one("tr", {},
        one("th", { scope: "col" }, "tile"), ...fields.map(([, head]) => one("th", { scope: "col" }, head)),
        one("th", { scope: "col" }, "O, l, m moved, elements"))), bodies[key])));
    const { bar, go } = transport(parts, name, last, at => {
      scores.forEach(box => {
        const tile = Number(box.dataset.tile);
        box.className = tile === at ? "now" : tile < at ? "seen" : "";
      });
      for (const key of ["fa1", "fa2"]) bodies[key].replaceChildren(...now[`${key}.steps`].slice(0, at + 1).map((step, j) =>
        one("tr", {}, one("th", { scope: "row" }, `${j}: keys ${step.keys[0]}–${step.keys[1] - 1}`),
          ...fields.map(([field]) => one("td", { "data-key": `${key}.steps.${j}.${field}` }, text([].concat(step[field])))),
          one("td", { "data-key": `${key}.steps.${j}.moved` }, text(step.moved)))));
      const { m, l, factor } = now["fa2.steps"][at];
      return `m = ${short(m)}, l = ${short(l)}, factor = ${short(factor)}.`;
    });
    parts.view.append(one("p", {}, `${now.title}; ${now.keys} keys in tiles of ${now.block} keys`),
      bar, one("div", { class: "scores", "aria-label": "scores" }, ...scores),
      one("div", { class: "sides" }, table("fa1", "K/V outer: O divided by l in every pass", "O is the result of attention over the keys so far."),
        table("fa2", "Q outer: O divided by l once, at the end", `O / l at the end: ${text(now["fa2.O"])}`)));
    go(steps[name] || 0);
  },

  tiles(parts, now) {
    parts.view.append(one("p", {}, "S has ", one("strong", { "data-key": "all" }, text(now.all)), " tiles and ",
      one("strong", { "data-key": "scores" }, text(now.scores)), " elements. By the papers' convention, the call takes ",
      one("strong", { "data-key": "flops" }, text(now.flops)), " FLOPs."));
  },

  plan(parts, now) {  // the bars draw two rows of the table, which is what is read aloud
    const kinds = [["bytes", "accessed"], ["dram", "DRAM"]];
    const planned = PANELS.plan.columns.filter(([key]) => !now[`${key}.refused`]);
    const most = Math.max(...planned.flatMap(([key]) => kinds.map(([kind]) => now[`${key}.${kind}`])));
    parts.view.append(one("div", { class: "bars", "aria-hidden": "true" }, ...planned.flatMap(([key, label]) => [
      one("b", {}, label), ...kinds.flatMap(([kind, words]) => {
        const value = now[`${key}.${kind}`];
        return [one("span", {}, words), one("div", { class: `bar ${kind}` },
          one("i", { style: `width: ${(78 * value) / most}%` }), size(value))];
      })])));
  },
};

fromAddress();
Object.keys(PANELS).forEach(build);
Promise.all(Object.keys(PANELS).map(update)).then(() => {
  performance.mark("ready");
  showLinked();
  document.body.dataset.ready = "yes";
});
addEventListener("hashchange", () => {
  fromAddress();
  Object.keys(PANELS).forEach(update);
  showLinked();
});
