"""The embedded engine: one process, hash buckets on threads."""
