"""The secret and the run id of tests that look at certain noise."""

SECRET, RUN = bytes(range(32)), bytes(range(16))
