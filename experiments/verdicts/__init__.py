"""The comparison of our stored numbers with published figures and with claims.

A question asks whether our numbers agree with a published figure or with a claim. The answer is a
verdict. The modules are:

- rule.py: the rule that turns points (pairs of our number and a published number) into a verdict
- evidence.py: quantities, which are numbers by sizes and other columns, made from stored rows
- questions.py: questions, and the tables of questions; questions.csv contains their texts
- paper_figures.py, claims.py: for each question, our quantity and the published quantity
- artefact.py: the table with which other people can check the main claims
- result.py: the main result as text, with numbers from the rows
"""

from experiments.lab.show.tables import Across

from . import artefact, claims, paper_figures, questions, result

QUESTIONS = (*paper_figures.QUESTIONS, *claims.QUESTIONS)


def tables() -> dict[str, Across]:
    """Return the tables of this package by name. They use rows of many experiments."""
    return {
        "artefact": artefact.TABLE,
        "rule": questions.RULE,
        "published": paper_figures.TABLE,
        "claims": claims.TABLE,
        "changed": questions.changed(QUESTIONS),
        "links": questions.links(QUESTIONS),
        "result": result.TEXT,
        "traffic": result.TRAFFIC,
    }
