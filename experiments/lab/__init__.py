"""What experiments share, in four packages.

package     contents                                                       imports from
record      rows, how they are stored, and what is known of their origin   -
measure     calls, times, counts, checks of results                        record
show        figures, tables and pages                                      measure, record
run         commands: they measure, store and draw experiments             show, measure, record
"""
