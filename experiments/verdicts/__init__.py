"""What the stored rows say about the papers' figures and about claims on them.

- rule.py: the one rule by which points become a verdict
- evidence.py: selects rows, and makes quantities (numbers by place) from them
- questions.py: a question as data, and its row on the page; questions.csv has the words
- paper_figures.py, claims.py: for each question our quantity and the published one
- artefact.py: the main claims as a form for people who check them
- result.py: the main result in sentences, with numbers from the rows
"""

from experiments.lab.show.tables import Across

from . import artefact, claims, paper_figures, questions, result

QUESTIONS = (*paper_figures.QUESTIONS, *claims.QUESTIONS)


def tables() -> dict[str, Across]:
    """Return the tables of these pages by name. They use rows of many experiments."""
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
