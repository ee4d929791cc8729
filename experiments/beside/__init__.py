"""What one experiment alone needs, or one command.

cache           lru: the model of L2
explore         explore_page, explore_panels, explore_picture, panels; explore_server is its command
generate        small_model, generation: a language model, its text with a cache and without one
gpt2_table      unfused_steps: the steps of standard attention, one by one
ladder          ceilings: what the hardware gives of each resource
loop_cost       loop_steps: the steps from FA-1 to FA-2
profile         profiler: what a profiler counts, with an emulator or Nsight Compute
ring            ring_ranks, ring_model, ring_rows: its processes, its model, what rows say
shapes          breadth: calls with options
speed_fp16      paper_bars: a paper's speed figure as the paper draws it, ours beside
timeline        film: its figure as an animated GIF
variants        variant_times, flex_variants: on a GPU, and beside flex_attention
commands        compare, compare_command; spills
"""
