"""Picking the next token on the device."""
