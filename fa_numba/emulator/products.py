"""Matrix products of a warpgroup (`wgmma`): computed at once, but usable only after a wait.

From its start to `wait_products`, a product reads its operands in shared memory and the registers
of A, and it writes the registers of C. Writing the operands, or accessing C, before the wait is an
error.

A warp waits only for its own part of the product (PTX ISA, "wgmma.wait_group"). This part reads the
warp's 16 rows of A and all of B. A warp knows that the parts of the other warps have ended when it
has synchronised with these warps.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from .boxes import REPEAT, ROW_BYTES, Boxes, Lent, swizzled
from .checks import PRODUCT, READING, SEVERAL, STAMP
from .errors import BarrierDivergence, Deadlock, EmulatorError, Misaligned, RegisterHazard
from .groups import WARP, Site, warps_of
from .local_memory import LocalArray

WARPGROUP = 128  # threads
ROWS = 64  # of A and C
STEP = 16  # elements of 16 bits of the summed dimension in one instruction
ITEM = 2  # bytes of an element
PANEL = ROW_BYTES // ITEM  # columns of a panel
GROUP_BYTES = 8 * ROW_BYTES  # bytes of eight rows of a panel
FRACTION_BITS = 23  # of a float32
REGISTERS = 1 << 16  # registers of a multiprocessor
MOST_REGISTERS = 255  # registers of a thread


class Together(BaseException):
    """Raised if the warps of a warpgroup are in different groups, but must run together.

    The thread block then begins again, and the four warps of each warpgroup are in one group.
    """


@lru_cache(maxsize=256)
def operand_places(
    rows: int, panel_rows: int, across: bool, steps: int, column: int
) -> tuple[np.ndarray, int, int]:
    """Return where the elements of a `wgmma` operand are in shared memory.

    The first result is a flat array with the position of each element, row by row. The operand has
    `rows` rows and 16 * `steps` columns. The second and the third result are the smallest and the
    largest position. Position 0 is at a multiple of 1024 bytes: the last one at or before the first
    element of the operand. A position counts elements of 16 bits. The positions follow from the PTX
    descriptor and the 128-byte swizzle.

    The operand is stored in panels of `panel_rows` rows with 128 bytes each. If `across` is set,
    the operand is stored transposed: a row of a panel then contains one element of each of 64 rows
    of the operand. `column` is the number of bytes from the beginning of a row of a panel to the
    first element of the operand.
    """
    row = np.arange(rows, dtype=np.int64)[:, None]
    k = np.arange(steps)[:, None]
    within = np.arange(STEP)
    if across:
        first = column + k * STEP * ROW_BYTES
        down = within // 8 * GROUP_BYTES + within % 8 * ROW_BYTES
        along = row // PANEL * panel_rows * ROW_BYTES + row % PANEL * ITEM
        byte = along + (first + down).reshape(1, -1)
    else:
        first = column + k * STEP // PANEL * panel_rows * ROW_BYTES + k * STEP % PANEL * ITEM
        byte = row * ROW_BYTES + (first + within * ITEM).reshape(1, -1)
    places = (swizzled(byte) // ITEM).reshape(-1)
    return places, int(places.min()), int(places.max())


def _exponents(x: np.ndarray) -> np.ndarray:
    """Return the largest power of two up to |x| for each element; 0 if |x| is below 2^-126."""
    return (x.view(np.uint32) & np.uint32(0x7F800000)).view(np.float32)


def summed_in_few_bits(
    C: np.ndarray, A: np.ndarray, B: np.ndarray, steps: int, bits: int
) -> np.ndarray:
    """Return C + A B as tensor cores compute it whose sums keep `bits` fraction bits.

    A: (rows, k), B: (columns, k) and C: (rows, columns) are float32. Each of the `steps`
    instructions adds k / `steps` products and C. Let E be the largest exponent of the addends,
    where a product's exponent is the sum of the exponents of its factors. Each addend is first
    rounded towards 0 to a multiple of 2^(E - bits). The sum of the rounded addends is exact. It is
    then rounded towards 0 to `bits` fraction bits.

    The rule was compared with an H200, for 13 bits and 32 products. All 1.3 million sums were equal
    bit for bit, with random addends and with addends that were chosen as special cases.
    """
    kept = np.uint32(-1 << FRACTION_BITS - bits & 0xFFFFFFFF)
    terms = A.shape[1] // steps
    left, right = np.ascontiguousarray(A.T), np.ascontiguousarray(B.T)
    of_left, of_right = _exponents(left), _exponents(right)
    made = np.empty_like(C)
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):  # NaN stays NaN
        for first in range(0, A.shape[1], terms):
            most = _exponents(C)
            for k in range(first, first + terms):
                np.multiply(of_left[k][:, None], of_right[k], out=made)
                np.maximum(most, made, out=most)
            units = np.where(most == 0, np.float32(1.0), np.float32(2.0**bits) / most)
            total = np.trunc(C * units)
            for k in range(first, first + terms):
                np.multiply(left[k][:, None], right[k], out=made)
                made *= units
                total += np.trunc(made, out=made)
            total /= units
            infinite = np.isinf(C)
            if infinite.any():
                rows = slice(first, first + terms)
                total = np.where(infinite, C + left[rows].T @ right[rows], total)
            C = (total.view(np.uint32) & kept).view(np.float32)
    return C


def _summed(C: np.ndarray, A: np.ndarray, B: np.ndarray) -> np.ndarray:
    """Return C + A B in single precision, A: (rows, k), B: (columns, k), C: (rows, columns).

    The 16 products of one instruction are summed first, and then added to C.
    """
    steps = A.shape[1] // STEP
    left = A.reshape(len(A), steps, STEP).transpose(1, 0, 2)
    right = B.reshape(len(B), steps, STEP).transpose(1, 2, 0)
    for made in left @ right:  # matrices so small that the library uses one thread
        C = C + made
    return C


@dataclass(slots=True, eq=False)
class Product:
    """A matrix product of one warpgroup that no thread has waited for yet.

    lanes       which lanes of the group belong to the warpgroup
    C           local array of the result
    A           local array of the left operand; None if A is in shared memory
    lent        the asynchronous reads of the operands in shared memory
    site        instruction that started the product
    registers   number of registers of C per thread
    ended       whether a call of `wait_products` has waited for the product. The kernel may
                access C only after a call of `wait_products` with C as its argument
    """

    ctx: Products
    warpgroup: int
    lanes: np.ndarray
    C: LocalArray
    A: LocalArray | None
    lent: list[Lent]
    site: Site
    registers: int
    ended: bool = False

    def require_free(self, array: LocalArray, writes: bool) -> None:
        """Raise RegisterHazard if the product does not allow an access to C or A in registers.

        `array` is the array of C or of A. While the product is in progress, C must be neither read
        nor written, and A must not be written. `writes` says whether the access is a write. Only
        accesses of lanes that take part and belong to the product's warpgroup are forbidden.
        """
        if array is not self.C and not writes:
            return
        touched = self.lanes & self.ctx.active()
        if touched.any():
            use = "writes" if array is self.C else "reads"
            text = (
                f"{array.name} is accessed, but no wait_products call has named {array.name} since "
                f"the wgmma product that {use} {array.name}. The product was started at "
                f"{self.ctx.line_of(self.site)}"
            )
            if self.ended:
                text += (
                    ". A wait_products call has waited for the product, but with another array. "
                    f"Pass {array.name} to that wait_products call"
                )
            lane = int(np.flatnonzero(touched)[0])
            raise self.ctx.fault(RegisterHazard, text, array.name, lane)


class Products(Boxes):
    """Methods of a running launch that emulate matrix products of warpgroups (`wgmma`).

    The class `Launch` inherits these methods.
    """

    __slots__ = ("warps_together", "_products", "_registers", "_registers_at")

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.warps_together = 1  # number of neighbouring warps that `schedule` keeps in one group
        self._products: dict[int, list[Product]] = {}  # by warpgroup, in the order of their starts
        self._registers: dict[int, int] = {}  # by warp: registers of a thread
        self._registers_at: dict[int, Site] = {}  # by warp: the last call that set this number

    def begin_blocks(self, first: int, count: int) -> None:
        """Prepare for a new group of thread blocks: forget all products of the blocks before.

        `first` is the number of the first block, and `count` the number of blocks that run
        together. The numbers by which this class knows arrays of registers are forgotten, too.
        """
        super().begin_blocks(first, count)
        self._products, self._registers, self._registers_at = {}, {}, {}

    def _warpgroups(self, operation: str) -> list[tuple[int, np.ndarray]]:
        """Return the warpgroups that take part: for each, its number and its lanes in the group.

        Raise an error if only some threads of a warpgroup take part. `operation` is the name of the
        called function, for messages.
        """
        self.alone()
        group, found = self.group, []
        lanes = self.active_lanes()
        numbers = group.tids[lanes] // WARPGROUP
        if lanes.size == WARPGROUP and numbers[0] == numbers[-1]:
            return [(int(numbers[0]), lanes)]
        for number in np.unique(numbers).tolist():
            mine = lanes[numbers == number]
            if mine.size != WARPGROUP:
                everywhere = group.tids // WARPGROUP == number
                if np.count_nonzero(everywhere) == mine.size and len(self._groups) > 1:
                    self._parted(operation, number)
                text = (
                    f"only {mine.size} of the {WARPGROUP} threads of warpgroup {number} call "
                    f"{operation}. All threads of a warpgroup must make this call together"
                )
                raise self.fault(BarrierDivergence, text, None, int(mine[0]))
            found.append((number, mine))
        return found

    def _parted(self, operation: str, warpgroup: int) -> None:
        """Raise an exception for a warpgroup whose threads do not all run in one group.

        The threads of a warpgroup must run in one group, because they compute a product together.
        The first time, raise Together. The thread block then begins again, and each group contains
        complete warpgroups. Raise EmulatorError in two cases: the threads of the warpgroup have
        separated again since then, or the thread block has fewer threads than the warpgroup needs.
        """
        tids = np.arange(WARPGROUP) + warpgroup * WARPGROUP
        same = self.warps_together * WARP == WARPGROUP
        if not same and tids[-1] < self.threads:
            raise Together
        text = (
            f"the {WARPGROUP} threads of warpgroup {warpgroup} must reach {operation} together, "
            "but only some of them took an earlier branch that contains a barrier or a wait. A GPU "
            "may run this, the emulator does not: move the barrier or wait out of that branch. The "
            f"threads of the block:{self._waiters()}"
        )
        raise self.fault(EmulatorError, text)

    def _of_warpgroup(self, value: Any, lanes: np.ndarray, name: str, array: str) -> int:
        """Return the index of an operand's first element, which must be equal in a warpgroup.

        `value` is the index as a number, or an array over the lanes. Raise EmulatorError if the
        threads pass different indices. `name` is "A" or "B", and `array` is the name of the
        operand's array.
        """
        if value.__class__ is not np.ndarray:
            return int(value)
        values = value[lanes]
        if (values != values[0]).any():
            tids = self.group.tids[lanes]
            other = int(np.flatnonzero(values != values[0])[0])
            text = (
                f"the threads of warpgroup {tids[0] // WARPGROUP} begin operand {name} of a "
                f"wgmma product at different elements: {array}[{values[0]}] in thread "
                f"{self.thread_name(int(tids[0]))}, {array}[{values[other]}] in thread "
                f"{self.thread_name(int(tids[other]))}. All threads of a warpgroup must pass the "
                "same index"
            )
            raise self.fault(EmulatorError, text, array, int(lanes[0]))
        return int(values[0])

    # ---- products

    def multiply(
        self, numbers: np.ndarray, rC: LocalArray, n: int, A: tuple[Any, ...], B: tuple[Any, ...],
        steps: int, adds: int, kept_bits: int | None = None,
    ) -> None:  # fmt: skip
        """Start the product C = A B of each warpgroup that takes part, or C += A B if `adds` is 1.

        numbers   table of 65536 entries that converts elements of A and B. The index is the 16
                  bits of the element, and the entry is its value. If an element contains two 8-bit
                  numbers, the entry contains both values, and the shape is (65536, 2).
        rC        registers of C, which has 64 rows and `n` columns
        A, B      the operands. An operand in shared memory is a tuple of four: shared array,
                  index of the first element, rows of a panel, and whether the operand is
                  stored transposed (see `operand_places`). If A is in registers, it is a tuple
                  of two: array of registers, and index of the first register.
        steps     number of `wgmma` instructions. Each instruction multiplies 16 columns of A and
                  of B, so that A and B have 16 * `steps` columns
        kept_bits
                  number of fraction bits that sums keep (see `summed_in_few_bits`); None if
                  sums are in single precision
        """
        if n % 8 or not 8 <= n <= 256:
            raise ValueError(
                "n, the number of columns of a wgmma product, must be a multiple of 8 from 8 to "
                f"256, got {n}"
            )
        if rC.size < n // 2:
            raise ValueError(
                f"{rC.name} must have at least {n // 2} elements (registers) for the {n} columns "
                f"of a wgmma product, got {rC.size}"
            )
        site = self.site()
        warpgroups = self._warpgroups("a wgmma product")
        waiting, rC.waiting = rC.waiting, []  # earlier products may still write C
        flying, rC.flying = rC.flying, []
        if waiting and not flying:
            rC.waiting = waiting
        for product in flying:
            if product.registers != n // 2 and any(
                product.lanes[lanes].any() for _, lanes in warpgroups
            ):
                rC.flying = flying
                product.require_free(rC, True)
        old = np.zeros((n // 2, self.group.count), np.float32)
        if adds:
            for e in range(n // 2):
                old[e] = rC[e]
        begun = []
        for number, lanes in warpgroups:
            lent: list[Lent] = []
            right = self._operand(numbers, number, lanes, B, n, steps, lent)
            if len(A) == 2:
                left = self._of_registers(numbers, A, lanes, steps)
            else:
                left = self._operand(numbers, number, lanes, A, ROWS, steps, lent, left=1)
            # Registers are in the order (half, chunk, pair), and threads in the order (warp, row,
            # place). Rows of the matrix are (warp, half, row), columns are (chunk, place, pair).
            C = old[:, lanes].reshape(2, n // 8, 2, 4, 8, 4).transpose(3, 0, 4, 1, 5, 2)
            C = C.reshape(ROWS, n)
            if kept_bits is None:
                C = _summed(C, left, right)
            else:
                C = summed_in_few_bits(C, left, right, steps, kept_bits)
            parts = C.reshape(4, 2, 8, n // 8, 4, 2).transpose(1, 3, 5, 0, 2, 4)
            old[:, lanes] = parts.reshape(-1, WARPGROUP)
            here = np.zeros(self.group.count, bool)
            here[lanes] = True
            registers = A[0] if len(A) == 2 else None
            begun.append(Product(self, number, here, rC, registers, lent, site, n // 2))
            self._instructions["wgmma"] = self._instructions.get("wgmma", 0) + steps
        for e, values in enumerate(old):
            rC.put(e, values)
        rC.flying = flying
        for product in begun:
            rC.depart(product)
            if product.A is not None:
                product.A.depart(product)
            self._products.setdefault(product.warpgroup, []).append(product)

    def _operand(
        self, numbers: np.ndarray, warpgroup: int, lanes: np.ndarray, operand: tuple[Any, ...],
        rows: int, steps: int, lent: list[Lent], left: int = 0,
    ) -> np.ndarray:  # fmt: skip
        """Start to read an operand in shared memory, and return the operand's values.

        The result has the shape (rows, 16 * steps) and the dtype float32. If an element contains
        two numbers, the result has twice as many columns. The record of the read is added to the
        list `lent`. `left` is 1 if the operand is A, and 0 if it is B. The other arguments are
        described in `multiply`.
        """
        array, index, panel_rows, across = operand
        at = self._of_warpgroup(index, lanes, "A" if left else "B", array.name)
        if array.itemsize != ITEM:
            raise TypeError(
                f"{array.name} must have elements of 16 bits to be an operand of a wgmma product, "
                f"got {array.dtype}"
            )
        byte = (array.first + at) * ITEM
        wrong = ""
        if panel_rows % 8:
            wrong = (
                f"has panels of {panel_rows} rows, but the number of rows of a panel must be a "
                "multiple of 8"
            )
        elif byte % 16 or byte % REPEAT >= ROW_BYTES:
            wrong = (
                f"starts at {array._element(array.first + at)}, byte {byte} of shared memory, but "
                f"must start at a multiple of 16 bytes that is in the first {ROW_BYTES} bytes of "
                f"{REPEAT}"
            )
        if wrong:
            text = f"operand {array.name} of a wgmma product {wrong}"
            raise self.fault(Misaligned, text, array.name, int(lanes[0]))
        column = byte % REPEAT
        places, least, most = operand_places(rows, panel_rows, bool(across), steps, column)
        first = array.first + at - column // ITEM
        low, high = least + first, most + first
        if low < array.first or high >= array.first + array.length:
            end = (low if low < array.first else high) - array.first
            raise self.outside(array.name, (array.length,), end, int(lanes[0]))
        bits = np.empty(places.size, np.int64)
        warps, row = WARPGROUP // WARP, self.warps + 2 * warpgroup + left
        code = (SEVERAL if left else PRODUCT) + self.warps + warps * warpgroup
        tids = self.group.tids[lanes]
        lent.append(self.lend(array, row, first, places, tids, bits, code, warps if left else 1))
        return numbers[bits].reshape(rows, -1)

    def _of_registers(
        self, numbers: np.ndarray, A: tuple[Any, ...], lanes: np.ndarray, steps: int
    ) -> np.ndarray:
        """Return the operand A from a warpgroup's registers, as (64, 16 * steps) in float32.

        If an element contains two numbers, the result has twice as many columns.
        """
        rA, first = A
        words = np.empty((4 * steps, WARPGROUP), np.int64)
        for e, row in enumerate(words, first):
            value = rA[e]
            row[:] = value[lanes] if value.__class__ is np.ndarray else value
        pairs = numbers[np.stack([words & 0xFFFF, words >> 16], axis=-1)]
        parts = pairs.reshape(2, 2 * steps, 4, 8, 4, -1)  # half, chunk, warp, group, place, pair
        return parts.transpose(2, 0, 3, 1, 4, 5).reshape(ROWS, -1)

    def wait_products(self, rC: LocalArray, count: int, pending: int) -> None:
        """Wait until at most the last `pending` products of each warpgroup are in progress.

        If the product that writes `rC` has ended, the kernel may then access `rC`. `count` is the
        number of registers of `rC`.
        """
        for number, _ in self._warpgroups("wait_products"):
            products = self._products.get(number, [])
            stay = len(products) - pending
            for product in products[: max(0, stay)]:
                self._end(product)
            marked = [p for p in products if not p.ended]
            for product in marked:
                for lent in product.lent:
                    lent.mark(READING)
            for product in [p for p in rC.flying if p.C is rC and p.ended]:
                if product.warpgroup == number:
                    if product.registers > count:
                        text = (
                            f"wait_products: count must be at least {product.registers}, the "
                            f"number of registers that the product writes, got {count}"
                        )
                        raise self.fault(RegisterHazard, text, rC.name)
                    rC.arrive(product)
            self._products[number] = marked

    def _end(self, product: Product) -> None:
        """Record that a product has ended, so that its operands may be written again."""
        product.ended = True
        if product.A is not None:
            product.A.arrive(product)
        first = product.warpgroup * WARPGROUP // WARP
        self.widen(0)
        self.clock += 2
        for lent in product.lent:
            lent.mark((self.clock - 1) * STAMP + lent.code)
        for warp in range(first, first + WARPGROUP // WARP):  # each warp knows its own part only
            self.seen[warp, self.warps + warp] = self.clock * STAMP

    # ---- registers

    def set_registers(self, count: int, operation: str) -> None:
        """Set the number of registers per thread of the warps that take part.

        `operation` is the called function, for messages.
        """
        if count % 8 or not 24 <= count <= 256:
            raise ValueError(
                f"{operation}: count must be a multiple of 8 from 24 to 256, got {count}"
            )
        self.alone()
        self.collective(operation, 0xFFFFFFFF, (), lambda values, present, mask: ())
        site = self.site()
        for warp in warps_of(self.group.tids[self.active()]).tolist():
            self._registers[warp], self._registers_at[warp] = count, site

    def left_over(self) -> None:
        """Raise an error if a thread block ends with numbers of registers that are not allowed.

        `take_registers` and `give_registers` set these numbers for each warp. The launch calls this
        method when a thread block ends.
        """
        super().left_over()
        if not self._registers:
            return
        launched = min(REGISTERS // self.threads // 8 * 8, MOST_REGISTERS)
        each = [self._registers.get(warp, launched) for warp in range(self.warps)]
        for warp, count in enumerate(each):
            first = warp * WARP // WARPGROUP * WARPGROUP // WARP
            if count != each[first]:
                text = (
                    f"warps {first} and {warp} of warpgroup {first * WARP // WARPGROUP} end with "
                    f"different numbers of registers per thread: {each[first]} and {count}. All "
                    "warps of a warpgroup must call give_registers and take_registers with the "
                    f"same count\n  warp {first}: {self._set_at(first)}\n  warp {warp}: "
                    f"{self._set_at(warp)}"
                )
                raise BarrierDivergence(text, block=self.block)
        if sum(each) > launched * self.warps:
            text = (
                f"the warps ask for {sum(each) / self.warps:.0f} registers per thread on average, "
                f"but the launch has only {launched}. take_registers would wait for ever: take "
                "fewer registers, or let other warps give more. Registers per thread by warp: "
                f"{', '.join(map(str, each))}"
            )
            raise Deadlock(text, block=self.block)

    def _set_at(self, warp: int) -> str:
        """Return a text that says where a warp last set its number of registers."""
        site = self._registers_at.get(warp)
        return "as launched" if site is None else f"set at {self.line_of(site)}"

    def _exit(self) -> None:
        """Raise RegisterHazard if lanes exit before a product that they started has ended."""
        super()._exit()
        for number in np.unique(self.group.tids[self.active()] // WARPGROUP).tolist():
            for product in self._products.get(number, []):
                text = (
                    "the thread exits before a wgmma product that it started has ended. Call "
                    f"wait_products({product.C.name}, ...) before the thread ends"
                )
                tid = number * WARPGROUP
                raise self.fault_at(RegisterHazard, text, tid, product.site, product.C.name)
