"""Rows, where they come from, and what runs an experiment.

registry    the experiments there are, and what a module must have to be one
options     what a run was asked for, and where it runs
runner, drawing     measuring, storing and drawing for the command line
store, provenance   rows in CSV files, and where they come from
recorder    the rows of a run until it is whole
kept        what numbers come from, and what need not be counted again
published   the papers' own numbers
"""

from .options import FIGURES, FILTERED, PUBLISHED, REPOSITORY, Bench, Options, Refused
from .store import EMULATOR, MODEL, Row, Store, StoreError, nested, select, values, write_if_changed
