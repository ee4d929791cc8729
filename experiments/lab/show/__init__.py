"""Makes figures, tables and pages from stored rows."""
