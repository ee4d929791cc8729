"""Experiments: each module measures rows, draws a figure of stored rows, and makes a table of them.

An experiment is one file in this folder. The command line finds it automatically. The file has

    a docstring               `list` prints its first sentence, `list NAME` prints all of it
    measure(options, bench)   measures and yields rows
    draw(rows)                draws the figure of stored rows
    table(rows)               makes the table of stored rows, if the experiment has a table

`lab.record.registry.Experiment` describes these functions, and what else an experiment may have.
The table is written to figures/tables/NAME.md between the markers `<!-- table: NAME -->` and `<!--
end: NAME -->`, where NAME is the module's name.

`python -m experiments --help` lists the commands. `lab` contains what experiments share, `beside`
helpers of single experiments, and `verdicts` the comparison with the papers.
"""
