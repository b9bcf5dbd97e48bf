"""The durable budget book.

`ledger.py` checks and writes charges; `balance.py` adds up what units have lost; `charges.py` is
what is written down, and `store.py` where; `refusals.py` says why a charge does not fit.
"""
