"""What is seen: figures of one look, tables, the pages.

style       one look for every figure
thumbs      the small figures of README
speed_figures   what the speed experiments draw
tables, report  tables, and the pages that show them
"""
