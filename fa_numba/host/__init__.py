"""The steps of a call on the CPU: arrays, options, plan, execution and launch cache.

The public functions of ``ops.py`` and ``kv_cache.py`` call this package.
"""
