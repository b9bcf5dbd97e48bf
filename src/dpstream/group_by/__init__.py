"""The path of a continual GROUP BY from rows to releases; `flow` is its heart."""
