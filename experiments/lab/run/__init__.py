"""The work behind `python -m experiments`: measure experiments, store rows, draw figures."""
