"""From the batch of a source to rows of ids and values."""
