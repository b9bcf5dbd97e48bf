"""Choosing bounds: how many groups and rows of a unit to keep, and where to clamp values.

Bounds must not come from the data for nothing: they are read off data that the user declares
public, or off noisy histograms that are paid for.
"""

from dpstream.bounds_proposal.propose import Proposal, bounds

__all__ = ["Proposal", "bounds"]
