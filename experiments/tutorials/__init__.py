"""Tutorials: scripts of about five minutes. Each has one idea, one picture, and exercises.

Each script has cells that begin with `# %%`. Editors such as VS Code run the cells one by one. To
run a complete script, type `python experiments/tutorials/lesson_1_both_orders.py`. The command
`make tutorials` makes a notebook of each script, with its outputs.
"""
