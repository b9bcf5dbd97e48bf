"""Files: CSV, JSON lines, Parquet."""
