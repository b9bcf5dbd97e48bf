"""Randomness, budgets and durable state: everything the promise rests on.

`spend.py` (mechanisms) and `query_spend.py` (GROUP BY) are the only ways to noise: they write the
ledger, then draw. `sensitivity.py` says how far one protected change can move a quantity,
`amounts.py` what a budget is; below them `ledger/`, `accounting/`, `noise/` and `state/`.
"""
