"""Pools of public distributions, budget series without end, and boosting: the parts of DPI."""
