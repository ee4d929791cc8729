"""Helpers that only one experiment, or one command, needs.

experiment or command    modules
cache                    lru: a model of L2
explore                  traced_calls: what the emulator traces; explore_page, explore_panels,
                         panels, typed_mask, walk: the order in which tiles move; explore_server
                         serves the page
generate                 small_model: a language model, run with a K/V cache and without one
gpt2_table               unfused_steps: the steps of standard attention, one by one
ladder                   ceilings: what the hardware reaches for each resource
profile                  profiler: what a profiler counts, by the emulator or by Nsight Compute
ring                     ring_ranks, ring_rows: its processes, its rows, a model of the time
speed_fp16               paper_bars: a paper's speed figure with our bars
variants                 variant_times: times on a GPU, compared with flex_attention
commands                 compare, spills
"""
