"""Numeric series under event-level privacy, released at once or after a delay."""
