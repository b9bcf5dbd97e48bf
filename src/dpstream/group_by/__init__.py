"""The path of a continual GROUP BY from rows to releases: `flow` shows it on one page.

Its stages: `bounding`, `groups` (exact sums), `key_selection`, `perturb`, `release_table`.
"""
