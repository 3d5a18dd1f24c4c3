"""Tuning tables: rows of kernel parameters with their evidence, and what they answer for a device."""
