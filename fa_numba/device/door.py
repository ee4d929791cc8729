"""``numba.cuda`` as kernels know it, where ``jit`` declares a kernel and what its launch needs."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numba.cuda

from fa_numba.device.kernel import Kernel


class _Cuda(ModuleType):
    """All of ``numba.cuda`` but ``jit``. To Numba, which knows modules by equality, it is that."""

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
        """Declares a kernel: the Numba types of its arguments, threads and bytes of dynamic shared
        memory a block, and blocks for which a multiprocessor should have registers.
        """

        def declared(function: Callable) -> Kernel:
            return Kernel(function, argument_types, threads, shared_bytes, min_blocks)

        return declared


cuda = _Cuda(numba.cuda.__name__)
