"""What a query will do and cost, in words and figures."""
