"""Estimates of the time of a plan on a GPU, and of what limits it, from data sheets of GPUs.

Nothing is measured. The GPU may be the GPU of this machine or any GPU of the table devices.csv.

    devices          data sheets of GPUs (DEVICES), and the GPU of this machine
    multiprocessor   the number of thread blocks that a multiprocessor holds, and its limit
    cache            the number of accessed bytes that L2 does not serve
    roofline         lower limits of the times of computing, L2 and device memory; the longest one

>>> import fa_numba
>>> gpu, shape = named("H200"), (1, 16, 4096, 128)
>>> with gpu.planning():
...     plan = fa_numba.plan(shape, shape, algorithm="fa2", unit="mma", dtype="float16")
>>> expected(plan, gpu).bound
'compute'
"""

from fa_numba.bounds.cache import Dram, dram
from fa_numba.bounds.devices import DEVICES, Device, as_gpu, here, named
from fa_numba.bounds.multiprocessor import Occupancy, occupancy
from fa_numba.bounds.roofline import Expected, computed_flops, expected
