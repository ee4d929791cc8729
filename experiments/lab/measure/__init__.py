"""Modules that produce the numbers of experiments: calls, inputs, checks, times and counters."""
