"""User level for ever: all rows of a user, over a stream that never ends, cost epsilon in all."""
