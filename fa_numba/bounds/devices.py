"""Data sheets of GPUs, and the properties of this machine's GPU as the driver reports them."""

from __future__ import annotations

import contextlib
import csv
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fa_numba import device
from fa_numba.checks import did_you_mean
from fa_numba.choices.units import UNITS

# Instructions with which tensor cores reach their peak speed, by major compute capability.
_AT_PEAK = {9: "wgmma", 10: "tcgen05"}
TABLE = Path(__file__).with_name("devices.csv")


@dataclass(frozen=True)
class Device:
    """A GPU: its sizes and its peak speeds.

    Parameters
    ----------
    name : str
        Short name, such as "H200".
    driver_name : str
        Name that the driver gives.
    capability : tuple of int
        Compute capability, such as (9, 0).
    multiprocessors : int
        Number of multiprocessors.
    block_shared_bytes : int
        Shared memory that one thread block can have, in bytes.
    shared_bytes : int
        Shared memory of a multiprocessor, in bytes.
    registers, threads, blocks : int
        Greatest numbers of registers, threads and thread blocks that a multiprocessor holds.
    l2_bytes : int
        Size of the L2 cache, in bytes.
    l2, dram : float or None
        Bandwidth of L2 and of device memory, in bytes per second. None if not known.
    fp16, fp32 : float or None
        Peak of the tensor cores (float16 products, float32 sums) and of the CUDA cores (float32),
        in FLOP/s. None if not known.
    source : str
        Where the numbers are from.
    present : bool, default False
        Whether the GPU is in this machine.

    Attributes
    ----------
    peak_instruction : str
        Instruction that tensor cores need for their peak speed; "" if any instruction does.

    Examples
    --------
    >>> gpu = DEVICES["A100"]
    >>> gpu.capability, gpu.multiprocessors, gpu.fp16
    ((8, 0), 108, 312000000000000.0)
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
        """Return the peak speed of a unit in FLOP/s.

        Parameters
        ----------
        unit : str
            Name of the unit, such as "simt" (CUDA cores) or "mma" (tensor cores).

        Returns
        -------
        float or None
            The peak; None if not known.
        """
        return self.fp16 if UNITS[unit].on_tensor_cores else self.fp32

    @property
    def peak_instruction(self) -> str:
        """Return the instruction that tensor cores need for their peak speed.

        The result is "" if every tensor-core instruction reaches the peak.
        """
        return _AT_PEAK.get(self.capability[0], "")

    def planning(self) -> contextlib.AbstractContextManager[None]:
        """Return a context manager in which `fa_numba.plan` plans for this GPU.

        The GPU need not be in this machine. Calls of attention functions inside the context still
        run on this machine's GPU or on the emulator.

        Returns
        -------
        context manager
            For a ``with`` statement.

        Examples
        --------
        >>> import fa_numba
        >>> shape = (1, 1, 4096, 256)
        >>> with DEVICES["RTX 3060"].planning():
        ...     small = fa_numba.plan(shape, shape, algorithm="fa2", unit="simt").tiles
        >>> with DEVICES["H200"].planning():
        ...     large = fa_numba.plan(shape, shape, algorithm="fa2", unit="simt").tiles
        >>> small.Bc < large.Bc
        True
        """
        return device.planning_for(self.capability, self.block_shared_bytes, self.multiprocessors)


_SPEEDS = {"l2": "l2_tb_s", "dram": "dram_tb_s", "fp16": "fp16_tflops", "fp32": "fp32_tflops"}


def _device(row: Mapping[str, str]) -> Device:
    """Return the `Device` of a row of devices.csv.

    The table has KiB, MiB, TB/s and TFLOP/s. The result has bytes, bytes per second and FLOP/s.
    """
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
    """Return the GPU of this name.

    Parameters
    ----------
    name : str
        Name in the table or the driver's name, in any case, with or without spaces and hyphens.

    Returns
    -------
    Device
        The GPU's data sheet.

    Raises
    ------
    ValueError
        If no GPU of the table has this name.

    Examples
    --------
    >>> named("rtx4090").multiprocessors
    128
    """
    for known in DEVICES.values():
        if _key(name) in (_key(known.name), _key(known.driver_name)):
            return known
    near = did_you_mean(str(name), DEVICES)
    raise ValueError(f"the name of the GPU must be one of {', '.join(DEVICES)}, got {name!r}{near}")


@contextlib.contextmanager
def as_gpu(name: str) -> Iterator[None]:
    """Run calls on the emulator as they would run on the GPU of this name.

    Units, tiles and splits are chosen for that GPU. A call that would not fit the GPU raises
    ValueError.

    Parameters
    ----------
    name : str
        Name of a GPU, as for `named`.

    Yields
    ------
    None
        The context, for a ``with`` statement.

    Raises
    ------
    ValueError
        If no GPU of the table has this name. Calls inside raise ValueError for tiles that do not
        fit the GPU.

    Examples
    --------
    >>> import fa_numba
    >>> shape, tiles = (1, 1, 64, 64), fa_numba.Tiles(128, 128)
    >>> with as_gpu("RTX 3060"):
    ...     fa_numba.plan(shape, shape, algorithm="fa2", tiles=tiles)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    ValueError: ... got 163840 bytes...
    """
    with device.using("emulator"), named(name).planning():
        yield


def _key(name: str) -> str:
    """Return a name in lower case with letters and digits only, to compare names."""
    return "".join(c for c in str(name).lower() if c.isalnum())


def here() -> Device | None:
    """Return the GPU of this machine.

    The sizes are from the driver. The speeds are from the data sheet, or None if the table has no
    GPU with the driver's name.

    Returns
    -------
    Device or None
        The GPU with ``present`` set; None if calls run on the emulator.
    """
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
