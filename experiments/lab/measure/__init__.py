"""Numbers: calls, inputs, times, counters, counts.

workloads   problem sizes of the papers, and inputs for them
series      our algorithms under the names that the data store has for them
calls, peers    calls of ours and of torch's alike, with options, and their checks; torch's kernels
flex        torch's flex_attention, compiled for a problem
variants    several calls compared at one problem, with hardware counters
check                       the comparison with float64 before anything is timed
timing, speeds, bandwidth   times
counters, counter_target    Nsight Compute
counts      accesses counted on the emulator
scaling     how they grow
moves       a traced call: which tile moves when, and what is on the chip meanwhile
tune        the sweep for the fastest tiles
clocks      clocks and power of the GPU while it is measured
"""
