"""What bounds a plan on a GPU, here or from its data sheet: nothing is measured.

``devices`` has the GPUs' data sheets (devices.csv) and the GPU that is here; ``multiprocessor`` how
many blocks one holds, and what limits them; ``cache`` which bytes L2 serves and which reach device
memory; ``roofline`` the time that compute and memory take at least, and which takes longest.
"""

from fa_numba.bounds.cache import Dram, dram
from fa_numba.bounds.devices import DEVICES, Device, as_gpu, here, named
from fa_numba.bounds.multiprocessor import Occupancy, occupancy
from fa_numba.bounds.roofline import Expected, computed_flops, expected
