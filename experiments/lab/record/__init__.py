"""Rows: what they are, how they are stored, where they are from, and which experiments exist."""

from .options import FIGURES, FILTERED, PUBLISHED, REPOSITORY, Bench, Options, Refused
from .store import EMULATOR, MODEL, Row, Store, StoreError, nested, select, values, write_if_changed
