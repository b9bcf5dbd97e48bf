"""Continual counters: one file per scheme, its matrices and its mechanism."""
