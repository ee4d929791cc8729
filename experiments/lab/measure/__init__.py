"""Numbers: calls, inputs, checks, times, hardware counters and counts. One module for each."""
