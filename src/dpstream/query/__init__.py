"""What is asked, as frozen values: rows and times (`row_spec`), aggregates, windows, schedules.

`query` is a continual GROUP BY, `series_query` a time-series mechanism over counts; `noise_plan`
says how much noise a query needs.
"""
