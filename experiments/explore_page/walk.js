// The order in which the forward kernels move tiles, and what is on the chip at each step: the functions
// of experiments/beside/walk.py and of experiments/lab/measure/moves.py. Names are those of the Python
// functions. An access is [kind, array, tile, bytes of a row].

const SUM_BYTES = 4;  // of an element of l, m, L and of the float32 sum of O
const IN_REGISTERS = "OlmL";  // arrays whose tiles are in registers; the others are in shared memory
const ROW_TILES = "QOlmL";  // arrays whose tiles are rows of Q; K and V have column tiles
// The lines of the papers' Algorithms 1 that an access stands for.
const LINES = {
  fa1: {
    "load K": [6], "load V": [6], "load Q": [8], "load O": [8], "load l": [8], "load m": [8],
    "store O": [9, 10, 11, 12], "store l": [13], "store m": [13],
  },
  fa2: { "load Q": [4], "load K": [7], "load V": [7, 8, 9, 10], "store O": [14], "store L": [15] },
};

// --- the walk (walk.py) ---

function walk(algorithm, problem, tiles) {
  const { N, d, dtype } = problem, { Br, Bc } = tiles, element = DTYPES[dtype], seen = [];
  for (let i = 0; i < ceil_div(N, Br); i++) seen.push(column_tiles(i, problem, tiles));
  const blocks = algorithm === "fa1"
    ? [walk_fa1(seen, ceil_div(N, Bc), d, element, starts_in_first_pass(problem))]
    : seen.map(([first, end], i) => walk_fa2(i, first, end, d, element));
  const moves = [];
  let clock = 0;
  blocks.forEach((accesses, block) => {
    for (const [kind, array, tile, row_bytes] of accesses) {
      const rows = ROW_TILES.includes(array) ? Br : Bc;
      const bytes = (Math.min((tile + 1) * rows, N) - tile * rows) * row_bytes;
      moves.push({ kind, array, tile, block, start: clock, stop: clock + bytes });
      clock += bytes;
    }
  });
  return moves;
}

// The accesses of FA-1's thread block, given the column tiles [first, end] that each row tile sees.
// In 16 bits O is a float32 sum in memory until the last visit of its row tile.
function walk_fa1(seen, Tc, d, element, starts) {
  const found = [];
  const state = (kind, i, row_bytes) =>
    found.push([kind, "O", i, row_bytes], [kind, "l", i, SUM_BYTES], [kind, "m", i, SUM_BYTES]);
  if (!starts) seen.forEach((_, i) => {  // line 2: O = 0, l = 0, m = -inf
    if (element < SUM_BYTES) found.push(["store", "O", i, d * element]);
    state("store", i, d * SUM_BYTES);
  });
  for (let j = 0; j < Tc; j++) {
    const rows = seen.map((_, i) => i).filter(i =>
      (seen[i][0] <= j && j < seen[i][1]) || (j === 0 && starts));
    if (!rows.length) continue;
    found.push(["load", "K", j, d * element], ["load", "V", j, d * element], ["load", "Q", rows[0], d * element]);
    rows.forEach((i, n) => {
      if (j > 0 || !starts) state("load", i, d * SUM_BYTES);
      // the next tile of Q, before this row tile is stored
      if (n + 1 < rows.length) found.push(["load", "Q", rows[n + 1], d * element]);
      const is_last = j >= seen[i][1] - 1;
      state("store", i, d * (is_last ? element : SUM_BYTES));
    });
  }
  return found;
}

// The accesses of FA-2's thread block for row tile i, which sees the column tiles from first to end - 1.
function walk_fa2(i, first, end, d, element) {
  const found = [["load", "Q", i, d * element]];
  for (let j = first; j < end; j++) found.push(["load", "K", j, d * element], ["load", "V", j, d * element]);
  found.push(["store", "O", i, d * element], ["store", "L", i, SUM_BYTES]);
  return found;
}

// --- what a figure shows of the moves (moves.py) ---

// Moves that a figure shows as one: a tile of O with its l and m.
function events(moves) {
  const found = [];
  for (const move of moves) {
    const event = found[found.length - 1], last = event && event[event.length - 1];
    const together = last && IN_REGISTERS.includes(move.array) && IN_REGISTERS.includes(last.array)
      && move.kind === last.kind && move.tile === last.tile && move.block === last.block;
    if (together) event.push(move);
    else found.push([move]);
  }
  return found;
}

// How many stores FA-1 makes before its first pass.
const fills = moves => Math.max(0, moves.findIndex(move => move.kind === "load"));

function by_block(moves) {
  const blocks = [];
  for (const move of moves) (blocks[move.block] = blocks[move.block] || []).push(move);
  return blocks;
}

// The intervals of the clock in which tiles are on chip. A tile of Q, K or V stays until another one is
// loaded over it. A tile of O, l or m stays until it is stored: from its load on; or, if it was not
// loaded, from when its tile of Q is there and the row tile before is stored.
function held(moves) {
  return by_block(moves).flatMap(own => {
    const found = [], shared = {}, there = {}, loaded = {};
    const add = (array, tile, start, stop) => found.push({ array, tile, start, stop });
    let tile = -1, started = 0, stored = own[0].start;
    for (const move of own) {
      const key = move.array + move.tile, before = shared[move.array];
      if (!IN_REGISTERS.includes(move.array)) {
        if (before) add(before.array, before.tile, before.start, move.start);
        shared[move.array] = move;
        if (move.array === "Q") there[move.tile] = move.stop;
      } else if (move.kind === "load") {
        loaded[key] = move.start;
      } else {
        if (tile !== move.tile || key in loaded) {
          tile = move.tile;
          started = Math.max(stored, there[tile] === undefined ? stored : there[tile]);
        }
        add(move.array, move.tile, key in loaded ? loaded[key] : started, move.stop);
        delete loaded[key];
        stored = move.stop;
      }
    }
    const end = own[own.length - 1].stop;
    for (const move of Object.values(shared)) add(move.array, move.tile, move.start, end);
    return found;
  });
}

// The tiles of S, in order, each with the interval of the clock in which it is computed. For FA-1 that is
// while Oi is on chip, for FA-2 from the load of Vj to the next load of V.
function visits(algorithm, moves, on_chip) {
  if (algorithm === "fa1") {
    const starts = new Map(on_chip.filter(tile => tile.array === "O").map(tile => [tile.stop, tile.start]));
    const found = [];
    let j = 0;
    for (const move of moves) {
      if (move.array === "K") j = move.tile;
      else if (move.array === "O" && move.kind === "store")
        found.push({ i: move.tile, j, start: starts.get(move.stop), stop: move.stop });
    }
    return found;
  }
  return by_block(moves).flatMap(own => {
    const columns = own.filter(move => move.array === "V"), O = own.find(move => move.array === "O");
    return columns.map((move, n) =>
      ({ i: own[0].tile, j: move.tile, start: move.start, stop: (columns[n + 1] || O).start }));
  });
}

// The steps as text, "moves|tiles on chip|tile of S|lines|thread block", and the clock after each step.
function steps(algorithm, moves) {
  const first = fills(moves), clean = moves.slice(first), on_chip = held(clean);
  const computed = visits(algorithm, clean, on_chip);
  const all = events(moves);
  const to_come = on_chip.map((tile, order) => ({ ...tile, order })).sort((a, b) => a.start - b.start);
  let filled = 0, from = 0, next = 0, there = [];
  const said = all.map(event => {
    const start = event[0].start, stop = event[event.length - 1].stop;
    const is_fill = filled < first;
    filled += event.length;
    while (next < to_come.length && to_come[next].start < stop) there.push(to_come[next++]);
    there = there.filter(tile => start < tile.stop).sort((a, b) => a.order - b.order);
    while (from < computed.length && computed[from].stop <= start) from++;
    const visit = computed[from] && computed[from].start <= start ? computed[from] : null;
    const lines = is_fill ? [2] : event.flatMap(move => LINES[algorithm][`${move.kind} ${move.array}`]);
    return [
      event.map(move => (move.kind === "load" ? "<" : ">") + move.array + move.tile).join(" "),
      [...new Set(there.map(tile => tile.array + tile.tile))].join(" "),
      visit ? `${visit.i},${visit.j}` : "",
      [...new Set(lines)].sort((a, b) => a - b).join(","),
      String(event[0].block),
    ].join("|");
  });
  return { steps: said, bytes: all.map(event => event[event.length - 1].stop) };
}
