"""What two or more mechanisms share, each part with its guarantee."""
