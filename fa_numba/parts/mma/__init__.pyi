# Written by .ci/part_names.py; run it again after a part is added, renamed or removed.
# mypy: disable-error-code="misc"

class epilogue:
    from fa_numba.parts.mma.epilogue import make_store_scores as store_scores
    from fa_numba.parts.mma.epilogue import make_times_scores as times_scores
    from fa_numba.parts.fragments.rows import make_write_rows as write_rows
    from fa_numba.parts.mma.epilogue import make_write_scores as write_scores
    from fa_numba.parts.mma.epilogue import make_write_split as write_split
    from fa_numba.parts.mma.epilogue import make_write_tile as write_tile
    from fa_numba.parts.mma.epilogue import make_write_values as write_values
class fa1_state:
    from fa_numba.parts.mma.fa1_state import make_initialise as initialise
    from fa_numba.parts.mma.fa1_state import make_read_state as read_state
    from fa_numba.parts.fa1_state import make_write_logsumexp as write_logsumexp
    from fa_numba.parts.mma.fa1_state import make_write_state as write_state
class gradients:
    from fa_numba.parts.mma.gradients import make_add_dq as add_dq
    from fa_numba.parts.mma.gradients import column_thread as column_thread
    from fa_numba.parts.mma.gradients import make_initialise_dq as initialise_dq
    from fa_numba.parts.gradients import make_of_scores as of_scores
    from fa_numba.parts.mma.gradients import make_query_place as query_place
    from fa_numba.parts.mma.gradients import make_read_dq as read_dq
    from fa_numba.parts.mma.gradients import make_row_dots as row_dots
    from fa_numba.parts.gradients import make_row_less_dlse as row_less_dlse
    from fa_numba.parts.gradients import make_scale_columns as scale_columns
    from fa_numba.parts.gradients import make_start_columns as start_columns
    from fa_numba.parts.mma.gradients import make_start_dq as start_dq
    from fa_numba.parts.mma.gradients import make_warp_and_thread as warp_and_thread
    from fa_numba.parts.mma.gradients import make_write_columns as write_columns
    from fa_numba.parts.mma.gradients import make_write_dq as write_dq
    from fa_numba.parts.mma.gradients import make_write_dv as write_dv
class grid:
    from fa_numba.parts.grid import make_head as head
    from fa_numba.parts.grid import head_after as head_after
    from fa_numba.parts.grid import make_heads_of_group as heads_of_group
    from fa_numba.parts.grid import make_key_rows as key_rows
    from fa_numba.parts.grid import make_query_head as query_head
    from fa_numba.parts.grid import make_query_rows as query_rows
    from fa_numba.parts.grid import make_row_tile as row_tile
    from fa_numba.parts.grid import make_rows_of_values as rows_of_values
    from fa_numba.parts.mma.grid import make_thread as thread
class load:
    from fa_numba.parts.mma.load import make_column_tiles as column_tiles
    from fa_numba.parts.mma.load import make_columns as columns
    from fa_numba.parts.mma.load import make_columns_early as columns_early
    from fa_numba.parts.mma.load import make_dq_shared_memory as dq_shared_memory
    from fa_numba.parts.mma.load import make_first_columns as first_columns
    from fa_numba.parts.mma.load import make_columns as k
    from fa_numba.parts.mma.load import make_next_k as next_k
    from fa_numba.parts.mma.load import make_next_q as next_q
    from fa_numba.parts.mma.load import make_p as p
    from fa_numba.parts.mma.load import make_p_transposed as p_transposed
    from fa_numba.parts.mma.load import make_q as q
    from fa_numba.parts.mma.load import make_rows as rows
    from fa_numba.parts.mma.load import make_shared_memory as shared_memory
    from fa_numba.parts.mma.load import make_step as step
    from fa_numba.parts.mma.load import make_v as v
    from fa_numba.parts.mma.load import make_value_columns as value_columns
    from fa_numba.parts.mma.load import make_value_rows as value_rows
    from fa_numba.parts.mma.load import make_values as values
class pairs:
    from fa_numba.parts.fragments.pairs import make_add_two as add_two
    from fa_numba.parts.fragments.pairs import make_read_floats as read_floats
    from fa_numba.parts.fragments.pairs import make_read_sums as read_sums
    from fa_numba.parts.fragments.pairs import make_read_two as read_two
    from fa_numba.parts.fragments.pairs import make_write_floats as write_floats
    from fa_numba.parts.fragments.pairs import make_write_two as write_two
class products:
    from fa_numba.parts.mma.products import make_add_dk as add_dk
    from fa_numba.parts.mma.products import make_add_ds as add_ds
    from fa_numba.parts.mma.products import make_add_dv as add_dv
    from fa_numba.parts.mma.products import make_add_output as add_output
    from fa_numba.parts.mma.products import make_add_stage as add_stage
    from fa_numba.parts.mma.products import make_add_stage_transposed as add_stage_transposed
    from fa_numba.parts.mma.products import make_divide_rows as divide_rows
    from fa_numba.parts.mma.products import make_dq as dq
    from fa_numba.parts.mma.products import make_finish_output as finish_output
    from fa_numba.parts.mma.products import make_load_fragments as load_fragments
    from fa_numba.parts.mma.products import make_load_value_fragments as load_value_fragments
    from fa_numba.parts.fragments.planes import make_score_factor as score_factor
    from fa_numba.parts.mma.products import make_scores as scores
    from fa_numba.parts.mma.products import make_store_ds as store_ds
    from fa_numba.parts.mma.products import make_store_p as store_p
    from fa_numba.parts.fragments.planes import make_tile_factor as tile_factor
    from fa_numba.parts.mma.products import make_to_unit as to_unit
    from fa_numba.parts.fragments.planes import make_units as units
    from fa_numba.parts.mma.products import make_value_scores as value_scores
    from fa_numba.parts.fragments.value_scales import make_value_unit as value_unit
    from fa_numba.parts.layout import make_warp_column as warp_column
class row_tiles:
    from fa_numba.parts.mma.row_tiles import make_at as at
    from fa_numba.parts.mma.row_tiles import make_at_with_o as at_with_o
    from fa_numba.parts.mma.row_tiles import make_backward_shared_memory as backward_shared_memory
    from fa_numba.parts.mma.row_tiles import make_load as load
    from fa_numba.parts.mma.row_tiles import make_load_with_o as load_with_o
    from fa_numba.parts.mma.row_tiles import make_take as take
class scores:
    from fa_numba.parts.bias import make_read_bias_or_state as read_bias_or_state
    from fa_numba.parts.scores import make_scale_and_mask as scale_and_mask
    from fa_numba.parts.scores import make_scale_and_mask_all as scale_and_mask_all
    from fa_numba.parts.scores import make_scale_bias_and_mask as scale_bias_and_mask
    from fa_numba.parts.mods import make_slopes as slopes
class softmax:
    from fa_numba.parts.mma.softmax import make_combine as combine
    from fa_numba.parts.softmax import make_drop as drop
    from fa_numba.parts.softmax import make_from_lse as from_lse
    from fa_numba.parts.softmax import make_kept as kept
    from fa_numba.parts.softmax import make_logsumexp as logsumexp
    from fa_numba.parts.softmax import make_normalise_rows as normalise_rows
    from fa_numba.parts.softmax import make_online as online
    from fa_numba.parts.softmax import make_online_of_lanes as online_of_lanes
    from fa_numba.parts.softmax import make_rescale_rows as rescale_rows
    from fa_numba.parts.softmax import make_scale_rows as scale_rows
    from fa_numba.parts.softmax import make_start_of_lanes as start_of_lanes
    from fa_numba.parts.softmax import make_sum_lanes as sum_lanes
class values:
    from fa_numba.parts.values import make_read as read
    from fa_numba.parts.values import make_read_maxima as read_maxima
    from fa_numba.parts.values import make_write as write
class visits:
    from fa_numba.parts.visits import make_backward_passes as backward_passes
    from fa_numba.parts.visits import make_column_passes as column_passes
    from fa_numba.parts.visits import make_column_range as column_range
    from fa_numba.parts.visits import make_columns_seen as columns_seen
    from fa_numba.parts.visits import make_first_visit as first_visit
    from fa_numba.parts.visits import make_is_unseen as is_unseen
    from fa_numba.parts.visits import more_by as more_by
    from fa_numba.parts.visits import next_by as next_by
    from fa_numba.parts.visits import make_next_column as next_column
    from fa_numba.parts.visits import make_next_row as next_row
    from fa_numba.parts.visits import make_next_visit as next_visit
    from fa_numba.parts.visits import make_own_rows as own_rows
    from fa_numba.parts.visits import make_row_after as row_after
    from fa_numba.parts.visits import make_row_ahead as row_ahead
    from fa_numba.parts.visits import make_row_range as row_range
    from fa_numba.parts.visits import make_row_sees_more as row_sees_more
    from fa_numba.parts.visits import make_row_starts as row_starts
    from fa_numba.parts.visits import make_rows_of_pass as rows_of_pass
    from fa_numba.parts.visits import make_rows_seen as rows_seen
    from fa_numba.parts.visits import make_sees_more as sees_more
    from fa_numba.parts.visits import make_share as share
    from fa_numba.parts.visits import make_share_of_columns as share_of_columns
    from fa_numba.parts.visits import make_visit_ahead as visit_ahead
