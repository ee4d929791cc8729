"""Modules with code that only one experiment, or one command, uses.

experiment or command   modules
cache                   lru: a model of L2
explore                 traced_calls: calls that the emulator traces; explore_page: the HTML
                        file; explore_panels, panels: the panels of the page; typed_mask: a
                        mask that a reader types; walk: the order in which tiles move;
                        explore_server: serves the page
generate                small_model: a language model, run with a K/V cache and without one
gpt2_table              unfused_steps: the steps of standard attention, one by one
ladder                  ceilings: the highest speed that the hardware reaches, by resource
profile                 profiler: counters of the emulator and of Nsight Compute
ring                    ring_tasks: the calls in their order; ring_ranks: the processes;
                        ring_spans: a GPU's busy time; ring_rows: rows, and a model of the time;
                        ring_fit: the model compared with measurements
speed_fp16              paper_bars: a paper's speed figure together with our numbers
variants                variant_times: times on a GPU, compared with flex_attention
command compare         compare
command faults          ring_faults
command spills          spills
"""
