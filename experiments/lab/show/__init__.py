"""What is seen: figures of one look, tables, the pages.

style       one look for every figure
thumbs      the small figures of README
film        both orders moment by moment, one of them the picture of the page
speed_figures   what the speed experiments draw
tables, report  tables, and the pages that show them
"""
