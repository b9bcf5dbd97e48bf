"""Engines that run queries: in this process, or on a cluster."""
