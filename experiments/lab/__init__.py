"""What experiments share, in three rooms: `measure`, `record` and `show`."""
