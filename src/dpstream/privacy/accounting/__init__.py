"""What noise amounts to, as (epsilon, delta), and what a promise buys.

`accountant.py` reads sums as (epsilon, delta); `curves.py` has the closed forms of GDP and zCDP;
`calibration.py` and `promises.py` go from a promise to budgets.
"""
