"""Continual counters as matrices: factorisations A = B C and their noise processes B z.

Queries stream float noise for many keys from them; `mechanisms/counters` measures in integers.
"""
