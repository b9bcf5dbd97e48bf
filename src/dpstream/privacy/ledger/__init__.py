"""The durable budget book: charges, balance, store, messages."""
