"""Scripts that run in the peers' environment; they import nothing of dpstream."""
