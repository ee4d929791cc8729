"""What experiments share: data store, provenance, timing, counters, peers, figure style."""
