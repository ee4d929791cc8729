"""What the stored rows say of the papers' figures and of claims about them.

    evidence.py     rows by what is asked of them; a question, a finding, a verdict, their tables
    published.py    one question for each published figure or table; fa1.py: those of FA-1's paper
    claims.py       claims C1 to C25; accesses.py: those that counts decide
    result.py       the main result, in sentences whose numbers are the rows'

A verdict is decided by a rule in code, so that it follows from the data and changes with it.
"""

from __future__ import annotations

from experiments.lab.tables import Make

from . import claims, published, result


def tables() -> dict[str, Make]:
    """Tables of the page by name: they take rows of many experiments."""
    return {
        "published": published.TABLE,
        "claims": claims.TABLE,
        "result": result.TEXT,
        "traffic": result.TRAFFIC,
    }
