"""Continual counters: factorisations A = B C, their noise, and exact integer coders."""
