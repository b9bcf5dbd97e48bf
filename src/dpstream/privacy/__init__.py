"""Randomness, budgets and durable state: everything the promise rests on."""
