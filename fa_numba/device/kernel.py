"""The class ``Kernel``: a kernel's function, launch bounds and machine code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from cuda.bindings import driver
from numba import cuda, types

from fa_numba.device import kernel_cache, linking, mlir, select
from fa_numba.device.front_end import without_repeats
from fa_numba.device.launch_record import checked


@dataclass(frozen=True, eq=False)
class Kernel:
    """A kernel with everything that a launch needs, except grid and arguments."""

    function: Callable  # the Python function
    argument_types: tuple  # Numba types of the arguments
    threads: int  # number of threads of a thread block
    shared_bytes: int  # size of the dynamic shared memory of a thread block
    min_blocks: int = 1  # number of thread blocks that must fit on a multiprocessor (registers)
    _compiled: dict = field(default_factory=dict, repr=False)  # compiled kernel by GPU number

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
        from cuda.core import ObjectCode

        device = cuda.get_current_device().id
        if device not in self._compiled:
            cubin, name = self.built(select.capability_of(device))
            cuda.current_context()
            kernel = ObjectCode.from_cubin(cubin).get_kernel(name)
            _allow_shared_memory(kernel, self.shared_bytes, device)
            self._compiled[device] = kernel
        return self._compiled[device]

    def built(self, capability: tuple[int, int]) -> tuple[bytes, str]:
        """Return the machine code (cubin) for the current GPU, and the name of its entry point.

        The machine code is read from disk, or else compiled and stored on disk. ``capability`` is
        the compute capability of the current GPU.
        """
        kept = kernel_cache.read(self, capability)
        if kept is not None:
            return kept
        if linking.is_newer(capability) or mlir.chosen():
            ptx, cubin, _ = linking.ptx_and_cubin(self, capability)
            name = linking.entry_of(ptx)
        else:
            dispatcher = cuda.jit(launch_bounds=(self.threads, self.min_blocks))(self.function)
            with without_repeats():
                library = dispatcher.compile(self.argument_types)._codelibrary
            cubin, name = bytes(library.get_cubin().code), library._entry_name
        kernel_cache.write(self, capability, cubin, name)
        return cubin, name


def _allow_shared_memory(kernel, size, device):
    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    handle = driver.CUkernel(int(kernel.handle))
    result = driver.cuKernelSetAttribute(attribute, size, handle, driver.CUdevice(device))
    checked(result, f"asking for {size} bytes of shared memory a block")
