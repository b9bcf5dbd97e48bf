"""Engines that run queries: in this process, or on a cluster.

`query_run.py` has what every run of a query is and the steps that it takes, `run_storage.py` where
its keys, budget and log are; `embedded/` and `spark/` take these steps each in their own way.
"""
