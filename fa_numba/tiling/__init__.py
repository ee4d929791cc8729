"""Block sizes, and how the threads of a block share a tile."""
