"""The commands of python -m fa_numba: `add_arguments` says what one takes, `run` gives its text."""
