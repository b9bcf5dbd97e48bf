"""Pieces that several mechanisms share, each with its guarantee."""
