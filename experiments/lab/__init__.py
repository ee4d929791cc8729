"""What experiments share, in three packages: `measure`, `record` and `show`."""
