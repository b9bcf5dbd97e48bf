"""What is asked: queries, aggregates, windows, schedules, and the noise that follows from them."""
