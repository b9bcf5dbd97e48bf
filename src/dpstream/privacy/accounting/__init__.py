"""What privacy events amount to, as (epsilon, delta), and what a promise buys.

`privacy_events.py` and `accountant.py` compose; `curves.py` has the closed forms of GDP and zCDP;
`calibration.py` and `promises.py` go from a promise to budgets.
"""
