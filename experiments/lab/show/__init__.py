"""Figures, tables and pages made of stored rows."""
