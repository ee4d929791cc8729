"""The object ``cuda`` that kernels import in place of ``numba.cuda``.

It has the attributes of ``numba.cuda``, except for ``jit``, which makes a ``Kernel``.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numba.cuda

from fa_numba.device.kernel import Kernel


class _Cuda(ModuleType):
    """A stand-in for the module ``numba.cuda``, in which ``jit`` makes a ``Kernel``.

    The stand-in compares equal to ``numba.cuda``, because Numba compares modules by ``==``.
    """

    def __getattr__(self, name: str) -> Any:
        return getattr(numba.cuda, name)

    def __eq__(self, other: object) -> bool:
        return other is self or other is numba.cuda

    def __hash__(self) -> int:
        return hash(numba.cuda)

    @staticmethod
    def jit(
        argument_types: tuple, threads: int, shared_bytes: int = 0, min_blocks: int = 1
    ) -> Callable[[Callable], Kernel]:
        """Return a decorator that makes a ``Kernel`` of a function.

        ``argument_types`` are the Numba types of the kernel's arguments. ``threads`` is the number
        of threads of a thread block. ``shared_bytes`` is the dynamic shared memory of a thread
        block in bytes. ``min_blocks`` is the number of thread blocks that must fit on a
        multiprocessor. The compiler limits the registers of a thread for this purpose.
        """

        def declared(function: Callable) -> Kernel:
            return Kernel(function, argument_types, threads, shared_bytes, min_blocks)

        return declared


cuda = _Cuda(numba.cuda.__name__)
