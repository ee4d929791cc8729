// The answers of the page's first three panels: the functions of experiments/beside/explore_panels.py, which
// are given the inputs of a panel and return what it shows by key. Names are those of the Python functions.
// An answer with the key "refused" says why there is none.

const MOST_SCORES = 64;
const ORDERS = ["fa1", "fa2"], ALGORITHMS = ["standard", ...ORDERS];
const UNITS = { simt: "float32", mma: "float16" };

// Give the keys of an answer a prefix.
const prefixed = (prefix, answer) =>
  Object.fromEntries(Object.entries(answer).map(([key, value]) => [`${prefix}.${key}`, value]));

// --- both orders, step by step ---

function order(algorithm, moves, plan_bytes) {
  const moved = (arrays, kind) => moves.reduce((sum, move) =>
    sum + (arrays.includes(move.array) && move.kind === kind ? move.stop - move.start : 0), 0);
  const text = steps(algorithm, moves);
  return {
    ...text,
    total: moves[moves.length - 1].stop,
    model: plan_bytes,
    inputs: moved("QKV", "load"),
    again: moved("Olm", "load"),
    written: moved("OlmL", "store"),
    visited: new Set(text.steps.map(step => step.split("|")[2]).filter(Boolean)).size,
    blocks: moves[moves.length - 1].block + 1,
  };
}

function orders({ N, d, Br, Bc, causal, window, unit }) {
  const problem = { batch: 1, heads: 1, N, d, dtype: UNITS[unit], causal: causal === "yes", window };
  const tiles = { Br, Bc }, found = { Tr: ceil_div(N, Br), Tc: ceil_div(N, Bc) };
  for (const name of ORDERS) {
    const accesses = ACCESSES.fwd[name](problem, tiles);
    const one = order(name, walk(name, problem, tiles), bytes_of(accesses));
    Object.assign(found, prefixed(name, { ...one, ...largest(accesses, "fwd") }));
  }
  return found;
}

// --- the softmax of one row ---

const maximum = values => values.reduce((most, x) => Math.max(most, x), -Infinity);
const sum_of = values => values.reduce((sum, x) => sum + x, 0);

// P V for one row of P, given the first row of V.
function times_rows(P, V, first) {
  return V[0].map((_, column) => sum_of(P.map((p, n) => p * V[first + n][column])));
}

// The steps of both loop orders for one row (algorithms.py), and the row's O.
function forward_steps(algorithm, scores, V, Bc) {
  let m = -Infinity, l = 0, O = V[0].map(() => 0);
  const found = [];
  for (let first = 0; first < scores.length; first += Bc) {
    const S = scores.slice(first, first + Bc), m_tile = maximum(S), m_new = Math.max(m, m_tile);
    const factor = Math.exp(m - m_new);
    // FA-1's P is relative to the largest score of the tile, FA-2's to that of all tiles so far.
    const base = algorithm === "fa1" ? m_tile : m_new, tile_factor = Math.exp(base - m_new);
    const P = S.map(s => Math.exp(s - base)), l_new = factor * l + tile_factor * sum_of(P);
    const PV = times_rows(P, V, first);
    O = O.map((o, n) => (algorithm === "fa1"
      ? (l * factor * o + tile_factor * PV[n]) / l_new
      : factor * o + PV[n]));
    [m, l] = [m_new, l_new];
    // FA-1 loads and stores O, l and m in each step.
    const moved = algorithm === "fa1" ? 2 * (O.length + 2) : 0;
    found.push({ j: first / Bc, keys: [first, first + S.length], S, P, m, l, factor, O, moved });
  }
  return { steps: found, O: algorithm === "fa1" ? O : O.map(o => o / l) };
}

// The softmax of a row of scores. Every result is rounded to float32, and numbers below 2^-126 become 0.
function in_float32(scores, algorithm) {
  const rounded = x => (Math.abs(x) < 2 ** -126 ? 0 : Math.fround(x));
  const S = scores.map(Math.fround), m = algorithm === "naive" ? 0 : maximum(S);
  const powers = S.map(s => rounded(Math.exp(Math.fround(s - m))));
  const l = powers.reduce((sum, x) => Math.fround(sum + x), 0);
  return powers.map(x => rounded(x / l));
}

function own_scores(text) {
  const parts = text.replaceAll(",", " ").split(/\s+/).filter(Boolean);
  if (parts.length < 1 || parts.length > MOST_SCORES)
    return { refused: `scores must have from 1 to ${MOST_SCORES} numbers, got ${parts.length}` };
  const wrong = parts.find(part => !(Math.abs(Number(part)) <= 1e4));
  if (wrong !== undefined) return { refused: `each score must be a number from -10000 to 10000, got '${wrong}'` };
  const scores = parts.map(Number);
  const V = scores.map((_, n) => scores.map((_, k) => (n === k ? 1 : 0)));
  return { title: "your scores; V is the unit matrix", scores, V, block: 4 };
}

function softmax({ example, block, scores: text }, { examples }) {
  const row = example === "own" ? own_scores(text) : examples[example];
  if (row.refused) return row;
  const { title, scores, V } = row, keys = scores.length;
  const taken = Math.min(block || row.block, keys), found = { title, keys, block: taken };
  for (const name of ORDERS) Object.assign(found, prefixed(name, forward_steps(name, scores, V, taken)));
  for (const [name, accesses] of [["naive", 3], ["safe", 4], ["online", 3]]) {
    const P = in_float32(scores, name);
    Object.assign(found, prefixed(name, { P, nan: P.filter(Number.isNaN).length, accesses: accesses * keys }));
  }
  return found;
}

// --- a calculator of memory traffic ---

// Arrays that the bars show together.
const GROUPS = {
  fwd: { Q: ["Q"], "K and V": ["K", "V"], O: ["O", "A"], "l, m and L": ["l", "m", "L"], "S and P": ["S", "P"] },
  bwd: {
    "Q, O, dQ and dO": ["Q", "O", "dQ", "dO", "A"], "K, V, dK and dV": ["K", "V", "dK", "dV"],
    "L and D": ["L", "D"], "S, P, dS and dP": ["S", "P", "dS", "dP"],
  },
};

function parts(accesses, passes) {
  return Object.fromEntries(Object.entries(GROUPS[passes]).map(([group, names]) => [group, bytes_of(accesses, names)]));
}

// The group of arrays with the most bytes, and its share of all bytes in percent.
function largest(accesses, passes) {
  const found = Object.entries(parts(accesses, passes));
  const [group, bytes] = found.reduce((most, one) => (one[1] > most[1] ? one : most));
  return { largest: group, share: (100 * bytes) / bytes_of(accesses) };
}

function traffic({ N, batch, heads, d, dtype, passes, causal, window, tiles, M, Br, Bc }) {
  const element = DTYPES[dtype];
  const sizes = tiles === "rule" ? paper_rule(Math.floor((M * 1024) / element), d) : { Br, Bc };
  const problem = { batch, heads, N, d, dtype, causal: causal === "yes", window };
  const found = {
    ...sizes, Tr: ceil_div(N, sizes.Br), Tc: ceil_div(N, sizes.Bc),
    held: 2 * (sizes.Br + sizes.Bc) * d * element,
    flops: flops(problem, passes),
  };
  for (const name of ALGORITHMS) {
    const accesses = ACCESSES[passes][name](problem, sizes), visited = tiles_visited(name, problem, sizes);
    Object.assign(found, prefixed(name, {
      bytes: bytes_of(accesses),
      loads: total(accesses.loads),
      stores: total(accesses.stores),
      visited,
      flops: 2 * PRODUCTS[passes] * visited * sizes.Br * sizes.Bc * d,
      workspace: workspace(name, problem, passes),
      parts: Object.values(parts(accesses, passes)),
      ...largest(accesses, passes),
    }));
  }
  return found;
}

const ANSWERS = { orders, softmax, traffic };
