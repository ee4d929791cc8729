"""Commands: they run experiments, store what these yield, and draw what is stored."""
