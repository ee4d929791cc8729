"""GPUs: what their data sheets say, and what the driver says of the one that is here."""

from __future__ import annotations

import contextlib
import csv
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fa_numba import device

TABLE = Path(__file__).with_name("devices.csv")


@dataclass(frozen=True)
class Device:
    """A GPU. `shared_bytes`, `registers`, `threads` and `blocks` are what a multiprocessor holds,
    `block_shared_bytes` what one block of it can have. `dram` and `l2` are bandwidths in bytes a
    second, `fp16` (tensor cores, sums in fp32) and `fp32` (CUDA cores) peaks in FLOP/s; None where
    they are not known. `source` says where the numbers are from, `present` whether it is here.
    """

    name: str
    driver_name: str
    capability: tuple[int, int]
    multiprocessors: int
    block_shared_bytes: int
    shared_bytes: int
    registers: int
    threads: int
    blocks: int
    l2_bytes: int
    l2: float | None
    dram: float | None
    fp16: float | None
    fp32: float | None
    source: str
    present: bool = False

    def peak(self, unit: str) -> float | None:
        """FLOP/s of a unit: "mma" or "simt"."""
        return self.fp32 if unit == "simt" else self.fp16

    def planning(self) -> contextlib.AbstractContextManager[None]:
        """A context in which plans are made for this GPU, which need not be here."""
        return device.planning_for(self.capability, self.block_shared_bytes, self.multiprocessors)


_SPEEDS = {"l2": "l2_tb_s", "dram": "dram_tb_s", "fp16": "fp16_tflops", "fp32": "fp32_tflops"}


def _device(row: Mapping[str, str]) -> Device:
    """The GPU of a row of the table, whose sizes are in KiB, MiB and tera a second."""
    sizes = ("multiprocessors", "registers", "threads", "blocks")
    major, minor = map(int, row["compute_capability"].split("."))
    found: dict[str, Any] = {name: row[name] for name in ("name", "driver_name", "source")}
    found |= {name: int(row[name]) for name in sizes}
    found |= {name: float(row[x]) * 1e12 if row[x] else None for name, x in _SPEEDS.items()}
    return Device(
        **found,
        capability=(major, minor),
        block_shared_bytes=int(row["shared_kib_a_block"]) << 10,
        shared_bytes=int(row["shared_kib"]) << 10,
        l2_bytes=int(row["l2_mib"]) << 20,
    )


with open(TABLE, newline="", encoding="utf-8") as _file:
    DEVICES = {row["name"]: _device(row) for row in csv.DictReader(_file)}


def named(name: str) -> Device:
    """The GPU of this name, in any case and spacing. Raises ValueError for one that is not known.

    >>> named("rtx4090").multiprocessors
    128
    """
    for known in DEVICES.values():
        if _key(name) in (_key(known.name), _key(known.driver_name)):
            return known
    raise ValueError(f"{name!r} is no known GPU: allowed is one of {', '.join(DEVICES)}")


@contextlib.contextmanager
def as_gpu(name: str) -> Iterator[None]:
    """Calls inside run on the emulator as they would on the GPU of this name: what is chosen is
    chosen for it, and what does not fit there is refused. Raises ValueError for one not known.

    >>> import fa_numba
    >>> shape, tiles = (1, 1, 64, 64), fa_numba.Tiles(128, 128)
    >>> with as_gpu("RTX 3060"):
    ...     fa_numba.plan(shape, shape, algorithm="fa2", tiles=tiles)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    ValueError: ... needs 163840 bytes of shared memory, the device has 101376 a block
    """
    with device.using("emulator"), named(name).planning():
        yield


def _key(name: str) -> str:
    return "".join(c for c in str(name).lower() if c.isalnum())


def here() -> Device | None:
    """The GPU here, limits by the driver, speeds by its data sheet; None without one."""
    if not device.on_gpu():
        return None
    found = device.describe()
    told: dict[str, Any] = {
        "capability": device.compute_capability(),
        "block_shared_bytes": found["shared_bytes"],
        "present": True,
        **{name: found[name] for name in ("multiprocessors", "l2_bytes")},
        **device.limits(),
    }
    for sheet in DEVICES.values():
        if sheet.driver_name == found["name"]:
            return replace(sheet, **told, source=f"sizes: the driver; {sheet.source}")
    told |= {"source": "sizes: the driver; no data sheet here"} | dict.fromkeys(_SPEEDS)
    return Device(found["name"], found["name"], **told)
