"""Tutorials: nine scripts. Each tutorial has one idea, one picture, and exercises.

Each script has cells that begin with `# %%`. Editors such as VS Code run the cells one by one. To
run a complete script, type `python -m experiments.tutorials.lesson_1_both_orders` in the folder of
the clone. The command `make tutorials` makes a notebook of each script, with the script's outputs.
"""
