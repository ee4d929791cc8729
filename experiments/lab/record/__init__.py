"""Rows of data: their columns, their storage, their origin, and the list of experiments."""

from .options import FIGURES, FILTERED, PUBLISHED, REPOSITORY, Bench, Options, Refused
from .store import EMULATOR, MODEL, Row, Store, StoreError, nested, select, values, write_if_changed
