// Global-memory accesses, FLOPs and workspace in closed form: the functions of fa_numba/io_model, for
// sequences of one length without options. Names are those of the Python functions. A problem is
// { batch, heads, N, d, dtype, causal, window }, where window is the number of columns that a row sees
// on either side (0: all). Tiles are { Br, Bc }.

const DTYPES = { float16: 2, bfloat16: 2, float32: 4 };  // bytes of an element
const ELEMENT_BYTES = 4;  // of l, m, L, D and of the float32 sum A
const OF_ONE_DTYPE = new Set(["Q", "K", "V", "O", "S", "P", "dO", "dQ", "dK", "dV", "dP", "dS"]);
const PRODUCTS = { fwd: 2, bwd: 5 };  // products of matrices in a tile of S

const ceil_div = (n, by) => Math.ceil(n / by);
const round_up = (n, to) => ceil_div(n, to) * to;
const total = counts => Object.values(counts).reduce((sum, n) => sum + n, 0);

// --- which tiles of S are visited (visits.py) ---

function columns_begin(row, { N, window }) {
  return window ? Math.min(Math.max(row - window, 0), N) : 0;
}

function columns_end(row, { N, causal, window }) {
  if (causal) return Math.min(row + 1, N);
  return window ? Math.min(row + window + 1, N) : N;
}

// The first column tile that row tile i sees, and one past the last.
function column_tiles(i, problem, { Br, Bc }) {
  const last = Math.min((i + 1) * Br, problem.N) - 1;
  return [Math.floor(columns_begin(i * Br, problem) / Bc), ceil_div(columns_end(last, problem), Bc)];
}

// Whether FA-1's pass over column tile 0 gives O, l and m (or dQ) their first values.
const starts_in_first_pass = problem => !problem.window;

// Sums over the visited tiles (i, j): their number, their rows, their columns, the rows without column
// tile 0, and the rows of each row tile once. With takes_all every row tile visits column tile 0.
function visit_sums(problem, tiles, takes_all = false) {
  const { batch, heads, N } = problem, { Br, Bc } = tiles, every_head = batch * heads;
  const sums = { tiles: 0, rows: 0, columns: 0, rows_again: 0, rows_once: 0 };
  for (let i = 0; i < ceil_div(N, Br); i++) {
    const rows = Math.min(N - i * Br, Br);
    let [first, end] = column_tiles(i, problem, tiles);
    const has_0 = first === 0 && end > 0, adds_0 = takes_all && !has_0;
    const seen = end - first + (adds_0 ? 1 : 0);
    sums.tiles += seen;
    sums.rows += rows * seen;
    sums.columns += Math.min(end * Bc, N) - first * Bc + (adds_0 ? Math.min(Bc, N) : 0);
    sums.rows_again += rows * (seen - (has_0 || adds_0 ? 1 : 0));
    sums.rows_once += seen ? rows : 0;
  }
  for (const name of Object.keys(sums)) sums[name] *= every_head;
  return sums;
}

// Sums that no mask changes.
function whole_sums({ batch, heads, N }, { Br, Bc }) {
  const every_head = batch * heads, Tr = ceil_div(N, Br), Tc = ceil_div(N, Bc);
  return {
    rows: every_head * N, columns: every_head * N, pairs: every_head * N * N, tiles: every_head * Tr * Tc,
    columns_by_row_tile: every_head * Tr * N, rows_by_column_tile: every_head * Tc * N,
  };
}

function tiles_visited(algorithm, problem, tiles) {
  if (algorithm === "standard") return whole_sums(problem, tiles).tiles;
  return visit_sums(problem, tiles, algorithm === "fa1" && starts_in_first_pass(problem)).tiles;
}

// --- accesses (accesses.py): { loads, stores, dtype }, elements by array ---

function count(problem, loads, stores) {
  const touched = counts => Object.fromEntries(Object.entries(counts).filter(([, n]) => n));
  return { loads: touched(loads), stores: touched(stores), dtype: problem.dtype };
}

function add_up(problem, kernels) {
  const sum = kind => kernels.reduce((sums, kernel) => {
    for (const [name, n] of Object.entries(kernel[kind])) sums[name] = (sums[name] || 0) + n;
    return sums;
  }, {});
  return { loads: sum("loads"), stores: sum("stores"), dtype: problem.dtype };
}

// Bytes that are loaded and stored; of the given arrays only, if there are names.
function bytes_of({ loads, stores, dtype }, names = null) {
  let bytes = 0;
  for (const counts of [loads, stores])
    for (const [name, n] of Object.entries(counts))
      if (!names || names.includes(name)) bytes += n * (OF_ONE_DTYPE.has(name) ? DTYPES[dtype] : ELEMENT_BYTES);
  return bytes;
}

// --- forward (count_standard.py, count_fa1.py, count_fa2.py) ---

function standard(problem, tiles) {
  const { d } = problem, head = whole_sums(problem, tiles);
  const loads = {
    Q: head.rows * d, K: head.columns_by_row_tile * d, S: head.pairs, P: head.pairs,
    V: head.columns_by_row_tile * d,
  };
  return count(problem, loads, { S: head.pairs, P: head.pairs, O: head.rows * d });
}

function fa1(problem, tiles) {
  const { d } = problem, head = whole_sums(problem, tiles), starts = starts_in_first_pass(problem);
  const visits = visit_sums(problem, tiles, starts);
  const read = starts ? visits.rows_again : visits.rows, started = starts ? 0 : head.rows;
  const written = visits.rows + started, kept = DTYPES[problem.dtype] === 4 ? "O" : "A";
  // Every column tile is seen by a row tile, so that the thread block of a head loads all of K and V once.
  const loads = { Q: visits.rows * d, K: head.columns * d, V: head.columns * d, [kept]: read * d, l: read, m: read };
  const stores = { [kept]: written * d, l: written, m: written };
  if (kept === "A") {
    stores.A -= visits.rows_once * d;
    stores.O = (visits.rows_once + started) * d;
  }
  return count(problem, loads, stores);
}

function fa2(problem, tiles) {
  const { d } = problem, head = whole_sums(problem, tiles), { columns } = visit_sums(problem, tiles);
  return count(problem, { Q: head.rows * d, K: columns * d, V: columns * d }, { O: head.rows * d, L: head.rows });
}

// --- backward ---

function standard_backward(problem, tiles) {
  const { d } = problem, head = whole_sums(problem, tiles), matrix = head.pairs;
  const product = { Q: head.rows * d, K: head.columns_by_row_tile * d };
  const scores = count(problem, product, { S: matrix });
  const softmax = count(problem, { S: matrix }, { P: matrix });
  const dP = count(problem, product, { S: matrix });
  const dS = count(problem, { P: matrix, dP: matrix }, { dS: matrix });
  const dV = count(problem, { P: matrix, dO: head.rows_by_column_tile * d }, { dV: head.columns * d });
  const dQ = count(problem, { P: matrix, V: head.columns_by_row_tile * d }, { O: head.rows * d });
  return add_up(problem, [scores, softmax, dP, dS, dV, dQ, dV]);  // the last one is dK's
}

function fa1_backward(problem, tiles) {
  const { d } = problem, head = whole_sums(problem, tiles), starts = starts_in_first_pass(problem);
  const visits = visit_sums(problem, tiles, starts);
  const read = starts ? visits.rows_again : visits.rows, started = starts ? 0 : head.rows;
  const kept = DTYPES[problem.dtype] === 4 ? "dQ" : "A", matrix = visits.rows * d;
  const loads = {
    Q: matrix, O: matrix, dO: matrix, L: visits.rows, [kept]: read * d, K: head.columns * d, V: head.columns * d,
  };
  const stores = { [kept]: (visits.rows + started) * d, dK: head.columns * d, dV: head.columns * d };
  if (kept === "A") {
    stores.A -= visits.rows_once * d;
    stores.dQ = (visits.rows_once + started) * d;
  }
  return count(problem, loads, stores);
}

function fa2_backward(problem, tiles) {
  const { d } = problem, head = whole_sums(problem, tiles), visits = visit_sums(problem, tiles);
  const kept = DTYPES[problem.dtype] === 4 ? "dQ" : "A", matrix = head.rows * d, added = visits.rows * d;
  const row_sums = count(problem, { O: matrix, dO: matrix }, { D: head.rows, [kept]: matrix });
  const loads = {
    Q: visits.rows * d, dO: visits.rows * d, L: visits.rows, D: visits.rows, K: head.columns * d,
    V: head.columns * d, [kept]: added,
  };
  const over_columns = count(problem, loads, { dK: head.columns * d, dV: head.columns * d, [kept]: added });
  const rounding = kept === "A" ? [count(problem, { A: matrix }, { dQ: matrix })] : [];
  return add_up(problem, [row_sums, over_columns, ...rounding]);
}

const ACCESSES = {
  fwd: { standard, fa1, fa2 },
  bwd: { standard: standard_backward, fa1: fa1_backward, fa2: fa2_backward },
};

// --- FLOPs and workspace (work.py) ---

// FLOPs by the papers' convention: a causal mask halves them.
function flops(problem, passes) {
  const { batch, heads, N, d, causal, window } = problem;
  const of_pair = (passes === "fwd" ? 2 : 5) * d * (causal && !window ? 1 : 2);
  return of_pair * batch * heads * pairs(N, causal, window);
}

// The number of (row, column) pairs that the window leaves.
function pairs(N, causal, window) {
  if (!window) return N * N;
  const below = end => {
    const rising = Math.min(Math.max(end, 0), N);
    return (rising * (rising - 1)) / 2 + Math.max(end - N, 0) * N;
  };
  const summed = offset => below(N + offset) - below(offset);
  return summed((causal ? 0 : window) + 1) - summed(-window);
}

// Bytes of memory that a call needs besides its inputs and outputs.
function workspace(algorithm, problem, passes) {
  const { batch, heads, N, d, dtype } = problem, rows = batch * heads * N;
  if (algorithm === "standard") return (passes === "fwd" ? 1 : 2) * rows * round_up(DTYPES[dtype] * N, 16);
  const kept = DTYPES[dtype] === 4 ? 0 : round_up(d, 2);
  if (passes === "bwd") return ELEMENT_BYTES * rows * (algorithm === "fa2" ? 1 + kept : kept);
  return ELEMENT_BYTES * rows * (algorithm === "fa1" ? 2 + kept : 1);
}

// Br and Bc by line 1 of FA-1's algorithm, for M elements of on-chip memory (choices/tiles.py).
function paper_rule(M, d) {
  const Bc = ceil_div(M, 4 * d);
  return { Br: Math.min(Bc, d), Bc };
}
