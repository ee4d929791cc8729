# Written by .ci/part_names.py; run it again after a part is added, renamed or removed.
# mypy: disable-error-code="misc"

from fa_numba.parts.namespace import bind as bind
class gradients:
    from fa_numba.parts.gradients import make_less_dlse as less_dlse
    from fa_numba.parts.gradients import make_of_scores as of_scores
    from fa_numba.parts.gradients import make_row_less_dlse as row_less_dlse
    from fa_numba.parts.gradients import make_scale_columns as scale_columns
    from fa_numba.parts.gradients import make_start_columns as start_columns
class grid:
    from fa_numba.parts.grid import make_head as head
    from fa_numba.parts.grid import head_after as head_after
    from fa_numba.parts.grid import make_heads_of_group as heads_of_group
    from fa_numba.parts.grid import make_key_end as key_end
    from fa_numba.parts.grid import make_key_rows as key_rows
    from fa_numba.parts.grid import make_lengths as lengths
    from fa_numba.parts.grid import member as member
    from fa_numba.parts.grid import make_query_end as query_end
    from fa_numba.parts.grid import make_query_head as query_head
    from fa_numba.parts.grid import make_query_rows as query_rows
    from fa_numba.parts.grid import make_row_tile as row_tile
    from fa_numba.parts.grid import make_rows_of_split as rows_of_split
    from fa_numba.parts.grid import make_rows_of_values as rows_of_values
