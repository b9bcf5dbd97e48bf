"""The embedded engine: one process, hash buckets on threads.

Rows come from `step_rows.py` (live ones by way of `arrivals.py`), the state goes to `snapshots.py`.
"""
