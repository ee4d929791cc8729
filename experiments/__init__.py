"""Experiments: each module measures rows, draws a figure of stored rows, and makes their table.

An experiment is one file here, which the command line finds by itself. Its docstring is what `list`
says of it; it has `measure(options, bench)`, `draw(rows)` and, where it has a table,
`table(rows)`; `lab.registry` says what each of them is, and what else there can be. The table
appears in figures/tables/NAME.md between the markers `<!-- table: NAME -->` and
`<!-- end: NAME -->`, where NAME is the module's.
`python -m experiments --help` says how to run them; `lab` holds what they share.
"""
