"""Experiments: each module measures rows and draws one figure from stored rows.

A module here has TITLE, DESCRIPTION, `measure(options, bench)` and `draw(rows)`; its name is the
experiment's. `python -m experiments --help` runs them. See `lab` for what they share.
"""
