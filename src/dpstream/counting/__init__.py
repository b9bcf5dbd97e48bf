"""Continual counters: factorisations A = B C, noise processes B z, and exact integer coders.

Mechanisms count with the coders; queries stream float noise for many keys from the processes.
"""
