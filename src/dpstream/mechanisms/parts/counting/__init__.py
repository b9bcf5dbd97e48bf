"""Continual counting: factorisations, noise processes, and how they become mechanisms."""
