"""What "auto" decides: the unit, its tiles, and how many blocks share what."""
