"""What one experiment alone needs, or one command.

cache           lru: the model of L2
explore         explore_page, explore_panels, panels, typed_mask; explore_server is its command
generate        small_model: a language model, its text with a cache and without one
gpt2_table      unfused_steps: the steps of standard attention, one by one
ladder          ceilings: what the hardware gives of each resource
profile         profiler: what a profiler counts, with an emulator or Nsight Compute
ring            ring_ranks, ring_rows: its processes, what rows say and a model of the time
speed_fp16      paper_bars: a paper's speed figure as the paper draws it, ours beside
variants        variant_times: on a GPU, and beside flex_attention
commands        compare, spills
"""
