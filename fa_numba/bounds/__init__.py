"""What limits the speed of a plan on a GPU, computed from data sheets. Nothing is measured.

The GPU may be the present one or any GPU of the table devices.csv.

    devices          data sheets of GPUs (DEVICES), and the GPU that is present
    multiprocessor   how many thread blocks a multiprocessor holds, and what limits their number
    cache            which of the accessed bytes L2 serves and which reach device memory
    roofline         lower limits of the time that computing and memory take, and which is longest

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
