"""Steps of the pipeline from rows to released tables."""
