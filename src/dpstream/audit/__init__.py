"""Attacks on what the other layers promise."""
