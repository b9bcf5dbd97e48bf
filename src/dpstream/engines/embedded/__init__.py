"""The embedded engine: one process, hash buckets on threads.

Rows come from `step_rows.py` (live ones by way of `live_reader.py`); the state goes to
`snapshots.py`.
"""
