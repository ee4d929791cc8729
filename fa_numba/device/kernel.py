"""The class ``Kernel``: a kernel's function, launch bounds and machine code."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from cuda.bindings import driver
from numba import cuda, types

from fa_numba.device import kernel_cache, linking, select
from fa_numba.device.launch_record import checked


@dataclass(frozen=True, eq=False)
class Kernel:
    """A kernel with everything that a launch needs, except grid and arguments.

    field            meaning
    function         the Python function of the kernel
    argument_types   Numba types of the kernel's arguments
    threads          number of threads of a thread block
    shared_bytes     bytes of dynamic shared memory of a thread block
    min_blocks       number of thread blocks that must fit on a multiprocessor. It limits the
                     registers of a thread
    _compiled        maps the number of a GPU to the kernel that was compiled for this GPU
    """

    function: Callable
    argument_types: tuple
    threads: int
    shared_bytes: int
    min_blocks: int = 1
    _compiled: dict = field(default_factory=dict, repr=False)

    @property
    def name(self) -> str:
        return self.function.__name__

    @property
    def signature(self):
        return types.void(*self.argument_types)

    def compiled(self):
        """Return the compiled kernel for the current GPU, an object of ``cuda.core``.

        The kernel is compiled at the first call. The driver is then told how much dynamic shared
        memory the kernel uses.
        """
        device = cuda.get_current_device().id
        if device not in self._compiled:
            self._load(*self.built(select.capability_of(device)), device)
        return self._compiled[device]

    def _load(self, cubin: bytes, name: str, device: int) -> None:
        """Load machine code with the entry ``name`` into the memory of the current GPU."""
        from cuda.core import ObjectCode

        cuda.current_context()
        kernel = ObjectCode.from_cubin(cubin).get_kernel(name)
        _allow_shared_memory(kernel, self.shared_bytes, device)
        self._compiled[device] = kernel

    def built(self, capability: tuple[int, int]) -> tuple[bytes, str]:
        """Return the machine code (cubin) for a GPU, and the name of its entry point.

        The machine code is read from disk, or else compiled and stored on disk. ``capability`` is
        the compute capability of the GPU, which need not be in this machine.
        """
        kept = kernel_cache.read(self, capability)
        if kept is not None:
            return kept
        return self._assembled(linking.compiled(self, capability), capability)

    def _assembled(self, code: linking.Compiled, capability: tuple[int, int]) -> tuple[bytes, str]:
        """Assemble compiled code, and store the machine code on disk.

        Return the machine code (cubin) and the name of its entry point.
        """
        cubin, _ = code.assembled()
        name = linking.entry_of(cubin)
        kernel_cache.write(self, capability, cubin, name)
        return cubin, name


def built_together(
    kernels: Iterable[Kernel], capability: tuple[int, int]
) -> list[tuple[bytes, str]]:
    """Return the machine code (cubin) of each kernel, and the name of its entry point.

    The result for a kernel equals the result of ``built``. While the assembler translates one
    kernel in another thread, Numba compiles the next kernel.
    """
    found: list[tuple[bytes, str] | Future[tuple[bytes, str]]] = []
    with ThreadPoolExecutor() as threads:
        for kernel in kernels:
            kept = kernel_cache.read(kernel, capability)
            if kept is None:
                code = linking.compiled(kernel, capability)
                found.append(threads.submit(kernel._assembled, code, capability))
            else:
                found.append(kept)
    return [each.result() if isinstance(each, Future) else each for each in found]


def compile_together(kernels: Iterable[Kernel]) -> None:
    """Compile kernels for the current GPU before they are launched.

    This takes less time than calling ``compiled`` of each kernel. Nothing happens if launches run
    on the emulator.
    """
    if not select.on_gpu():
        return
    device = cuda.get_current_device().id
    missing = [kernel for kernel in dict.fromkeys(kernels) if device not in kernel._compiled]
    # Kernels that use much shared memory are large: others are compiled while one is assembled.
    missing.sort(key=lambda kernel: -kernel.shared_bytes)
    if missing:
        built = built_together(missing, select.capability_of(device))
        for kernel, (cubin, name) in zip(missing, built, strict=True):
            kernel._load(cubin, name, device)


def _allow_shared_memory(kernel, size, device):
    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    handle = driver.CUkernel(int(kernel.handle))
    result = driver.cuKernelSetAttribute(attribute, size, handle, driver.CUdevice(device))
    checked(result, f"asking for {size} bytes of shared memory a block")
