"""Reports of a tuning and of a batch-size search.

In: what `tune.json` holds. Out: the table on the terminal, the progress display and the page `report.html`. `tables`
and `agreement` compute the rows, `text` and `page` show them.
"""
