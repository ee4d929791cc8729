"""What the stored rows say of the papers' figures and of claims about them.

- rule.py: the one rule: kinds, factors, trends; from points to a verdict
- evidence.py: rows by what is asked of them, and quantities made of them
- questions.py: a question as data, its row on the page; questions.csv: the words of each
- published.py, claims.py: our quantity and the published one of each question
- artefact.py: the main claims as a form, for who checks them
- result.py: the main result, in sentences whose numbers are the rows'
"""

from experiments.lab.show.tables import Across

from . import artefact, claims, published, questions, result

QUESTIONS = (*published.QUESTIONS, *claims.QUESTIONS)


def tables() -> dict[str, Across]:
    """Tables of the page by name: they take rows of many experiments."""
    return {
        "artefact": artefact.TABLE,
        "rule": questions.RULE,
        "published": published.TABLE,
        "claims": claims.TABLE,
        "changed": questions.changed(QUESTIONS),
        "links": questions.links(QUESTIONS),
        "result": result.TEXT,
        "traffic": result.TRAFFIC,
    }
