"""Serve what a pipeline publishes: a feed and a page for everybody, another side for the operator.

Nothing that depends on data leaves on a public route unless it is a release.
"""
