"""The commands of ``python -m fa_numba``: ``compile``, ``plan`` and ``trace``, one module each.

A command's module contains two functions that ``__main__.py`` calls. ``add_arguments`` adds the
arguments of the command to a parser. ``run`` returns the text that the command prints. The other
modules (``arguments``, ``ending``, ``text``) contain functions that several commands use.
"""
