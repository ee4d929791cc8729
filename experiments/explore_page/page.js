// Shows the panels: inputs, answers, steps and the page's address. The other scripts compute the answers.

const DATA = JSON.parse(document.getElementById("data").textContent);
const PANELS = DATA.panels;
const CALM = matchMedia("(prefers-reduced-motion: reduce)").matches;
const state = {};  // panel: its inputs, as text
const shown = {};  // panel: its elements
const at_step = {};  // panel: the step that is shown

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

// --- how values are written ---

const short = x => (typeof x !== "number" ? x : Number.isFinite(x) ? String(Number(x.toPrecision(4)))
  : Number.isNaN(x) ? "NaN" : x < 0 ? "-inf" : "inf");
// All digits of a number; of a larger one than JavaScript counts, or of something else, nothing.
const exact = x => (typeof x === "number" && x <= Number.MAX_SAFE_INTEGER
  ? x.toLocaleString("en-US", { maximumFractionDigits: 6 }) : "");
function scaled(value, scales) {
  for (const [sign, of] of scales)
    if (value >= 0.9995 * of) return `${(value / of).toPrecision(3)} ${sign}`;
  return exact(value);
}
const SCALES = [["E", 1e18], ["P", 1e15], ["T", 1e12], ["G", 1e9], ["M", 1e6]];
const size = bytes => (bytes < 999.5 ? `${bytes} B` : `${scaled(bytes, [...SCALES, ["k", 1e3]])}B`);
const WRITTEN = {
  bytes: size,
  count: value => scaled(value, SCALES),
  number: value => (typeof value === "number" ? exact(Number(value.toPrecision(3))) : String(value)),
  words: value => String(value),
};
function text(value, kind) {
  if (value === null || value === undefined) return "–";
  return Array.isArray(value) ? value.map(short).join(" ") : WRITTEN[kind](value);
}
const percent = share => `${share < 99.5 ? Number(share.toPrecision(2)) : Math.round(share)} %`;

// --- answers ---

const computes = name => name in ANSWERS || DATA.live;

// The stored answer for inputs: each key has the axes that it depends on, values, and indices into them.
function lookup(name, inputs) {
  const axes = Object.entries(PANELS[name].axes), found = {};
  const positions = axes.map(([axis, { values }]) => values.findIndex(v => String(v) === inputs[axis]));
  for (const [key, [over, values, at]] of Object.entries(PANELS[name].table)) {
    const value = values[at[over.reduce((sum, n) => sum * axes[n][1].values.length + positions[n], 0)]];
    if (value !== undefined && !(key.endsWith("refused") && value === "")) found[key] = value;
  }
  return found;
}

// Why a text is no value of an axis, or nothing.
function wrong(axis, { values, words, least, most, text: free }, value) {
  if (free || value in words || values.some(v => String(v) === value)) return "";
  if (least === null) return `${axis} must be one of ${values.join(", ")}, got ${value}`;
  const number = Number(value), whole = /^\s*\d+\s*$/.test(value) && number >= least && number <= most;
  return whole ? "" : `${axis} must be an integer from ${least} to ${most}, got ${value || "nothing"}`;
}

async function answer(name) {
  const { axes } = PANELS[name], given = Object.entries(state[name]);
  for (const [axis, value] of given) {
    const refused = wrong(axis, axes[axis], value);
    if (refused) return { refused };
  }
  const is_mask_typed = name === "orders" && (state.orders.mask || "").trim();
  if (name in ANSWERS && !is_mask_typed) {
    const typed = given.map(([axis, value]) => [axis, axes[axis].least === null ? value : Number(value)]);
    return ANSWERS[name](Object.fromEntries(typed), DATA);
  }
  if (!DATA.live) return lookup(name, state[name]);
  if (is_mask_typed) say(name, "The emulator is running ...");
  const asked = shown[name].asked = new AbortController();
  return (await fetch(`api/${name}?${new URLSearchParams(state[name])}`, { signal: asked.signal })).json();
}

// --- inputs and the address ---

function start() {
  for (const [name, panel] of Object.entries(PANELS)) {
    delete at_step[name];
    state[name] = {};
    for (const [axis, { first }] of Object.entries(panel.axes)) state[name][axis] = String(first);
  }
}

// A link names the panel that was looked at, then all inputs of panels that are not as the page begins.
function fromAddress() {
  start();
  for (const [key, value] of new URLSearchParams(location.hash.slice(1))) {
    const [name, axis] = key.split("."), panel = PANELS[name];
    if (axis === "step" && panel && /^\d{1,6}$/.test(value)) at_step[name] = Number(value);
    const known = panel && panel.axes[axis];
    if (!known || wrong(axis, known, value)) continue;
    if (computes(name) || known.values.some(v => String(v) === value)) state[name][axis] = value;
  }
}

function toAddress(name) {
  const parts = [];
  for (const [each, panel] of Object.entries(PANELS)) {
    const chosen = Object.entries(state[each] || {});
    if (at_step[each] || chosen.some(([axis, value]) => value !== String(panel.axes[axis].first)))
      parts.push(...chosen.map(([axis, value]) => [`${each}.${axis}`, value]));
    if (at_step[each]) parts.push([`${each}.step`, at_step[each]]);
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
  at_step[name] = 0;
  toAddress(name);
  update(name);
}

function input(name, axis) {
  const { label, values, words, least, most, text: free } = PANELS[name].axes[axis];
  const id = `${name}-${axis}`, now = () => state[name][axis];
  const set = value => String(value) === now() || change(name, { [axis]: String(value) });
  const whole = one("label", { for: id }, one("span", {}, label));
  const sync = shown[name].sync;
  if (free) {
    const is_mask = axis === "mask";  // for which the server takes its time
    const box = one("input", { type: "text", id, maxlength: 400, [is_mask ? "onchange" : "oninput"]: e =>
      change(name, is_mask ? { [axis]: e.target.value } : { example: "own", [axis]: e.target.value }) });
    sync.push(() => { if (document.activeElement !== box) box.value = now(); });
    whole.append(box);
    whole.classList.add("wide");
  } else if (least !== null && computes(name)) {
    const box = one("input", { type: "number", id, min: least, max: most, step: 1, oninput: e => set(e.target.value) });
    const slide = one("input", { type: "range", min: 0, max: values.length - 1, "aria-label": label,
      oninput: e => set(values[e.target.value]) });
    sync.push(() => {
      if (document.activeElement !== box) box.value = now();
      if (String(values[slide.value]) !== now()) slide.value = values.filter(v => v <= Number(now())).length - 1;
      slide.setAttribute("aria-valuetext", now());
    });
    whole.append(one("span", { class: "pair" }, box, slide));
  } else {
    const every = computes(name) ? [...new Set([...values.map(String), ...Object.keys(words)])] : values;
    const box = one("select", { id, onchange: e => set(e.target.value) },
      ...every.map(v => one("option", { value: v }, words[v] || (typeof v === "number" ? exact(v) : v))));
    sync.push(() => { box.value = now(); });
    whole.append(box);
  }
  if (name === "traffic" && ["M", "Br", "Bc"].includes(axis))
    sync.push(() => { whole.hidden = (state.traffic.tiles === "rule") !== (axis === "M"); });
  return whole;
}

// --- what every panel has ---

function build(name) {
  const panel = PANELS[name];
  const parts = shown[name] = { sync: [], view: one("div", { class: "view" }), table: one("div", { class: "scroll" }) };
  parts.said = one("p", { class: "said", "aria-live": "polite" });
  parts.refused = one("p", { class: "refused bad", role: "alert" });
  document.querySelector("nav").append(one("a", { href: `#${name}`, onclick: e => {
    e.preventDefault();
    toAddress(name);
    goTo(name);
  } }, panel.title));
  const here = () => toAddress(name);
  document.querySelector("main").append(one("section", { id: name, "aria-labelledby": `${name}-title`, onclick: here, onfocusin: here },
    one("h2", { id: `${name}-title`, tabindex: -1 }, panel.title),
    one("p", { class: "question" }, panel.question), one("p", { class: "sentence" }, panel.sentence),
    one("form", { class: "inputs", onsubmit: e => e.preventDefault() }, ...Object.keys(panel.axes).map(axis => input(name, axis))),
    parts.refused, parts.view, parts.said, parts.table, one("p", { class: "note" }, panel.note)));
}

const failed = error => error.name === "AbortError" ? null : { refused: `The server did not answer: ${error.message}` };
function say(name, words) {
  shown[name].said.textContent = words;
}

async function update(name) {
  const parts = shown[name];
  parts.sync.forEach(sync => sync());
  if (parts.asked) parts.asked.abort();
  const now = await answer(name).catch(failed);
  if (!now) return;
  if (parts.stop) parts.stop();
  parts.refused.textContent = now.refused || "";
  if (now.refused) return;  // what was shown before stays
  say(name, "");
  parts.view.replaceChildren();
  parts.table.replaceChildren(numbers(name, now));
  VIEWS[name](parts, now, name);
  if (document.body.dataset.ready && !parts.said.textContent) say(name, summary(name, now));
}

// What a change did, for those who do not see the table: its first row.
function summary(name, now) {
  const { columns, rows } = PANELS[name];
  const [key, label, kind] = rows[0];
  return `${label}: ${columns.map(([column, words]) =>
    `${words.split(" (")[0]} ${now[`${column}.refused`] ? "none" : text(now[`${column}.${key}`], kind)}`).join(", ")}.`;
}

// An element that shows the value of a key, with all digits as its title.
function shows(kind, now, key, written, attributes = {}) {
  const value = now[key], digits = exact(value), words = text(value, written);
  const more = digits && digits !== words ? { title: digits } : {};
  return one(kind, { "data-key": key, ...more, ...attributes }, words);
}

function numbers(name, now) {
  const { columns, rows, title } = PANELS[name];
  const body = rows.map(([key, label, kind], n) => one("tr", {}, one("th", { scope: "row" }, label),
    ...columns.flatMap(([column]) => {
      const refused = now[`${column}.refused`], words = kind === "words" ? "words" : "";
      if (!refused) return [shows("td", now, `${column}.${key}`, kind, { class: words })];
      return n ? [] : [one("td", { class: "words bad", rowspan: rows.length, "data-key": `${column}.refused` }, refused)];
    })));
  return one("table", { "aria-label": title },
    one("thead", {}, one("tr", {}, one("td"), ...columns.map(([, label]) => one("th", { scope: "col" }, label)))),
    one("tbody", {}, ...body));
}

// Which arrays move most, and why.
function most_moved(now, name, passes) {
  const group = now[`${name}.largest`], reason = (DATA.reasons[passes][name] || {})[group];
  const because = reason ? ` ${reason.slice(0, 1).toUpperCase()}${reason.slice(1).replace("{Tr}", exact(now.Tr)).replace("{Tc}", exact(now.Tc)).replace(" 1 passes", " 1 pass")}.` : "";
  return one("span", {}, `Most bytes: ${group}, `,
    one("b", { "data-key": `${name}.share` }, percent(now[`${name}.share`])), ".", because);
}

// Buttons, a slider and keys for the steps from 0 to `last`; `show` draws one and returns words for it.
function transport(parts, name, last, show) {
  let at = 0, timer = null;
  const slide = one("input", { type: "range", min: 0, max: last, value: 0, "aria-label": "step", oninput: e => go(Number(e.target.value)) });
  const play = one("button", { type: "button", onclick: () => (timer ? stop() : run()) }, "Play");
  const place = one("output", {});
  function go(to) {
    at = Math.max(0, Math.min(last, to));
    slide.value = at;
    const words = show(at);
    place.textContent = `step ${at + 1} of ${last + 1}`;
    slide.setAttribute("aria-valuetext", place.textContent);
    say(name, words);
    if (at !== (at_step[name] || 0)) {
      at_step[name] = at;
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
    button("Last", () => last), slide, place);
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

// --- the first panel ---

const KINDS = [["load", "load of Q, K or V"], ["again", "load of O, l or m"],
  ["store", "store of O, l, m or L"], ["shared", "held in shared memory"], ["registers", "held in registers"],
  ["seen", "tile of S: computed"], ["now", "tile of S: being computed"], ["never", "tile of S: skipped"]];

// The kind of a step, by its first move.
const kind_of = moves => (moves[0] === ">" ? "store" : IN_REGISTERS.includes(moves[1]) ? "again" : "load");

function side(name, now) {
  const { Tr, Tc } = now, title = PANELS.orders.columns.find(([key]) => key === name)[1];
  const wide = name === "fa1" ? ["O", "l", "m"] : ["O", "L"];
  const S = 190, x0 = 74, y0 = 86, tiles = {};
  const picture = svg("svg", { viewBox: "0 0 380 294", role: "img", "aria-label": `tiles of the matrices, ${title}` });
  const tile = (key, x, y, w, h) => {
    tiles[key] = svg("rect", { x, y, width: w, height: h, class: "tile" });
    picture.append(tiles[key]);
  };
  const label = (x, y, words, kind = "") => picture.append(svg("text", { x, y, "text-anchor": "middle", class: kind }, words));
  const [N, Br, Bc] = ["N", "Br", "Bc"].map(axis => Number(state.orders[axis]));
  const begin = row => (S * Math.min(row, N)) / N, outlined = S / Math.max(Tr, Tc) > 9;
  const x = j => x0 + begin(j * Bc), y = i => y0 + begin(i * Br);
  const w = j => x(j + 1) - x(j), h = i => y(i + 1) - y(i);
  for (let i = 0; i < Tr; i++) tile(`Q${i}`, 20, y(i), 42, h(i));
  for (let j = 0; j < Tc; j++) { tile(`K${j}`, x(j), 8, w(j), 28); tile(`V${j}`, x(j), 42, w(j), 28); }
  for (let i = 0; i < Tr; i++) for (let j = 0; j < Tc; j++) tile(`S${i},${j}`, x(j), y(i), w(j), h(i));
  const places = { O: [276, 42], l: [330, 14], m: [352, 14], L: [330, 14] };
  for (const array of wide) for (let i = 0; i < Tr; i++) tile(`${array}${i}`, places[array][0], y(i), places[array][1], h(i));
  label(41, y0 - 6, "Q");
  label(x0 - 10, 27, "K");
  label(x0 - 10, 61, "V");
  label(x0 + S / 2, y0 + S + 14, "S (never in global memory)", "quiet");
  for (const array of wide) label(places[array][0] + places[array][1] / 2, y0 - 6, array);
  const all = now[`${name}.steps`].map(step => step.split("|")), clock = now[`${name}.bytes`];
  const visited = all.map(([, , visit]) => visit), first_visit = {};
  visited.forEach((key, n) => { if (key && !(key in first_visit)) first_visit[key] = n; });
  for (const key of Object.keys(tiles)) if (key[0] === "S" && !(key.slice(1) in first_visit)) tiles[key].classList.add("never", ...(outlined ? ["outlined"] : []));
  const lines = DATA.algorithms[name].map(([words, of]) => [one("span", {}, words || " "), of]);
  const listing = one("pre", { tabindex: 0, "aria-label": `the algorithm, ${title}` }, ...lines.map(([line]) => line));

  // Bytes of each kind after each step.
  const so_far = { load: [], again: [], store: [] };
  all.forEach(([moves], at) => {
    for (const kind of Object.keys(so_far))
      so_far[kind].push((at ? so_far[kind][at - 1] : 0) + (kind_of(moves) === kind ? clock[at] - (at ? clock[at - 1] : 0) : 0));
  });
  const most = Math.max(now["fa1.total"], now["fa2.total"]);
  const bars = KINDS.slice(0, 3).filter(([kind]) => so_far[kind][all.length - 1]).map(([kind, words]) => {
    const bar = one("i", { class: kind }), size = one("span");
    return { kind, bar, size, row: [one("span", { class: "what" }, `${words.split(" ")[0]}s of ${words.split(" of ")[1].replace(" or ", " and ")}`), one("div", { class: "bar" }, bar, size)] };
  });
  const moved = one("strong", { "data-key": `${name}.now` }), block = one("span", { class: "quiet" });
  const head = one("h3", {}, `${title}: `, moved, " of ", one("span", {}, size(now[`${name}.total`])), " moved ", block);
  let lit = [], was_at = 0;
  const show = at => {
    const done = at >= all.length, [moves, held, visit, of, number] = done ? ["", "", "", "", ""] : all[at];
    for (const key of lit) tiles[key].classList.remove("load", "again", "store", "shared", "registers", "now");
    lit = [];
    const mark = (key, kind) => {
      if (!tiles[key]) return;
      tiles[key].classList.add(kind);
      lit.push(key);
    };
    for (const key of held.split(" ").filter(Boolean)) mark(key, IN_REGISTERS.includes(key[0]) ? "registers" : "shared");
    for (const move of moves.split(" ").filter(Boolean)) mark(move.slice(1), kind_of(move));
    for (const key of visited.slice(Math.min(was_at, at), Math.max(was_at, at) + 1))
      if (key) tiles[`S${key}`].classList.toggle("seen", first_visit[key] < at && key !== visit);
    was_at = at;
    if (visit) mark(`S${visit}`, "now");
    const current = of.split(",").map(Number);
    for (const [line, numbers] of lines) line.classList.toggle("lit", !done && numbers.some(n => current.includes(n)));
    const first = listing.querySelector(".lit");
    if (first) listing.scrollTop = first.offsetTop - listing.offsetTop - listing.clientHeight / 3;
    const last = Math.min(at, all.length - 1);
    for (const { kind, bar, size: words } of bars) {
      bar.style.width = `${(70 * so_far[kind][last]) / most}%`;
      words.textContent = size(so_far[kind][last]);
    }
    moved.textContent = size(clock[last]);
    block.textContent = done ? "(finished)" : name === "fa1" ? "(one thread block)" : `(thread block of row tile ${number})`;
    const [first_move] = moves.split(" "), names = [...new Set(moves.replace(/[<>]/g, "").split(" "))].join(", ");
    return `${name === "fa1" ? "FA-1" : "FA-2"} ${done ? "has ended" : `${first_move[0] === ">" ? "stores" : "loads"} ${names}`}.`;
  };
  const chart = one("div", { class: "bars" }, ...bars.flatMap(({ row }) => row));
  const beside = one("div", { class: "beside" }, one("p", {}, most_moved(now, name, "fwd")), chart);
  return { element: one("div", {}, head, one("div", { class: "both" }, picture, beside), listing), show };
}

// Both clocks are bytes: the next step is that of the order whose next move begins first.
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

const legend = kinds => one("div", { class: "legend" }, ...kinds.map(([kind, words]) =>
  one("span", {}, one("i", { class: kind }), words)));

const VIEWS = {
  orders(parts, now, name) {
    const sides = ORDERS.map(each => side(each, now));
    const at = together(now["fa1.bytes"], now["fa2.bytes"]);
    const { bar, go } = transport(parts, name, at.length - 1, n => sides.map((s, k) => s.show(at[n][k])).join(" "));
    parts.view.append(bar, legend(KINDS), one("div", { class: "sides" }, ...sides.map(s => s.element)));
    go(at_step[name] || 0);
  },

  softmax(parts, now, name) {
    const fields = ["m", "l", "factor", "P", "O"], last = now["fa1.steps"].length - 1;
    const scores = now["fa2.steps"].flatMap((step, j) => step.S.map(x => one("span", { "data-tile": j }, short(x))));
    const bodies = { fa1: one("tbody"), fa2: one("tbody") };
    const keys_of = ([first, end]) => (end - first > 1 ? `keys ${first}–${end - 1}` : `key ${first}`);
    const table = (key, title, means) => one("div", {}, one("h3", {}, title), one("p", { class: "note" }, means),
      one("div", { class: "scroll" }, one("table", { "aria-label": title }, one("thead", {}, one("tr", {},
        one("th", { scope: "col" }, "tile"), ...fields.map(head => one("th", { scope: "col" }, head)),
        one("th", { scope: "col" }, "moved"))), bodies[key])));
    const { bar, go } = transport(parts, name, last, at => {
      scores.forEach(box => {
        const tile = Number(box.dataset.tile);
        box.className = tile === at ? "now" : tile < at ? "seen" : "";
      });
      for (const key of ORDERS) bodies[key].replaceChildren(...now[`${key}.steps`].slice(0, at + 1).map((step, j) =>
        one("tr", {}, one("th", { scope: "row" }, `${j}: ${keys_of(step.keys)}`),
          ...fields.map(field => one("td", { "data-key": `${key}.steps.${j}.${field}` }, text([].concat(step[field])))),
          one("td", { "data-key": `${key}.steps.${j}.moved` }, String(step.moved)))));
      const { m, l, factor } = now["fa2.steps"][at];
      return `m = ${short(m)}, l = ${short(l)}, factor = ${short(factor)}.`;
    });
    parts.view.append(one("p", {}, `${now.title}; ${now.keys} keys in tiles of ${now.block}. `
      + "P is e^(score - maximum), and moved is the number of elements of O, l and m that a step loads and stores."),
      bar, one("div", { class: "scores", "aria-label": "scores" }, ...scores),
      one("div", { class: "sides" },
        table("fa1", "K/V outer (FA-1): O divided by l in every pass", "O is the result of attention over the keys so far."),
        table("fa2", "Q outer (FA-2): O divided by l once, at the end", `At the end, O / l = ${text(now["fa2.O"])}`)));
    go(at_step[name] || 0);
  },

  traffic(parts, now) {
    const { passes } = state.traffic, groups = Object.keys(GROUPS[passes]);
    const strong = (key, kind) => shows("strong", now, key, kind);
    const most = Math.max(...ALGORITHMS.map(name => now[`${name}.bytes`]));
    parts.view.append(
      one("p", {}, "Tiles of S have ", strong("Br", "count"), " rows and ", strong("Bc", "count"), " columns: Tr = ",
        strong("Tr", "count"), " row tiles and Tc = ", strong("Tc", "count"), " column tiles. One tile each of Q, K, V and O takes ",
        strong("held", "bytes"), " together. By the papers' convention, the call has ", strong("flops", "count"), " FLOPs."),
      legend(groups.map((group, n) => [`group${n}`, group])),
      one("div", { class: "bars" }, ...PANELS.traffic.columns.flatMap(([name, label]) => [
        one("b", {}, label),
        one("div", { class: "bar whole" }, one("div", { class: "stack", style: `width: ${(85 * now[`${name}.bytes`]) / most}%` },
          ...now[`${name}.parts`].map((bytes, n) => one("i", {
            class: `group${n}`, style: `flex-grow: ${bytes / now[`${name}.bytes`]}`, title: `${groups[n]}: ${size(bytes)}`,
          }))), one("span", {}, size(now[`${name}.bytes`]))),
        one("p", { class: "whole" }, most_moved(now, name, passes)),
      ])));
  },

  plan(parts, now) {  // the bars draw two rows of the table, which is what is read aloud
    const kinds = [["bytes", "loaded and stored"], ["dram", "reach DRAM"]];
    const planned = PANELS.plan.columns.filter(([key]) => !now[`${key}.refused`]);
    const most = Math.max(...planned.flatMap(([key]) => kinds.map(([kind]) => now[`${key}.${kind}`])));
    parts.view.append(one("div", { class: "bars", "aria-hidden": "true" }, ...planned.flatMap(([key, label]) => [
      one("b", {}, label), ...kinds.flatMap(([kind, words]) => {
        const value = now[`${key}.${kind}`];
        return [one("span", {}, words), one("div", { class: `bar ${kind}` },
          one("i", { style: `width: ${(78 * value) / most}%` }), size(value))];
      })])), one("p", { class: "buttons" }, "Open the calculator with these tiles:", ...planned.map(([key, label]) => one("button", {
      type: "button", onclick: () => {
        const [Br, Bc] = now[`${key}.tiles`].split(" x "), { gpu, ...call } = state.plan;
        change("traffic", { ...call, Br, Bc, tiles: "own", window: "0" });
        toAddress("traffic");
        goTo("traffic");
      } }, `tiles of ${label.split(" (")[0]}`))));
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
