"""Numbers: calls, inputs, times, counters, counts, each in its module."""
