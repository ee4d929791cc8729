"""The choices that "auto" makes: the unit, the tiles, and the numbers of splits.

file        contents
requests    the caller's choices, and the request from which a plan is made
units       one class per unit, and the choice of the unit
tiles       the choice of tiles
splits      the choice of key splits and group splits
decisions   all choices for a pass, with reasons
copies      grids of launches, and arguments whose form depends on the unit
arguments   the classes of arguments of launches
facts       the measurements behind the choices, in CSV files
tuned       the fastest tiles in measurements
makespan    the time until the last thread block of a launch ends
"""
