"""What experiments share.

registry    the experiments there are, and what a module must have to be one
options     what a run was asked for, and where it runs
runner      measuring, storing and drawing for the command line
workloads   problem sizes of the papers, and inputs for them
series      our algorithms under the names that the data store has for them
variants    several calls compared at one problem, with hardware counters
peers       torch's kernels
calls       calls of ours and of torch's alike, with options, and their checks
unfused_steps   the steps of standard attention, one by one
timing      times, and the check against float64 before them
counters, counter_target    Nsight Compute
counts      accesses counted on the emulator
moves       a traced call: which tile moves when, and what is on the chip meanwhile
film        the same as an animated GIF
precompile  kernels compiled side by side before anything is timed
tune        the sweep for the fastest tiles
store, provenance           rows in CSV files, and where they come from
journal     the rows of a complete run until it is whole
review      whether new rows may replace a recording
kept, slices                what numbers come from, and what need not be counted again
schedule    what to measure anew, and in which order
clocks      clocks and power of the GPU while it is measured
published   the papers' own numbers
speeds, speed_figures       what the speed experiments have in common
paper_bars                  a paper's speed figure as the paper draws it, ours beside
block_figures, sparse_figures   curves over the block size, and over the share of blocks
resources   registers, spills and warps of compiled kernels
style       one look for every figure
thumbs      the small figures of README
tables, report              tables, and the pages that show them
"""
