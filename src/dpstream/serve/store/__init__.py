"""Releases, kept for those who read them: written by the run, read by the server."""
