"""Continual counters: one mechanism a file; the matrices that queries use too are in `counting`."""
