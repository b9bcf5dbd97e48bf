"""Tables in memory."""
