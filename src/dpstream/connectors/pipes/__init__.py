"""Standard input and output."""
