# Written by .ci/part_names.py; run it again after a part is added, renamed or removed.
# mypy: disable-error-code="misc"

class pairs:
    from fa_numba.parts.fragments.pairs import make_add_two as add_two
    from fa_numba.parts.fragments.pairs import make_read_floats as read_floats
    from fa_numba.parts.fragments.pairs import make_read_sums as read_sums
    from fa_numba.parts.fragments.pairs import make_read_two as read_two
    from fa_numba.parts.fragments.pairs import make_write_floats as write_floats
    from fa_numba.parts.fragments.pairs import make_write_two as write_two
