"""Reports of a tuning run and of a batch-size search.

In: the content of `tune.json`. Out: the table on the terminal, the progress display and the page `report.html`.
`tables` and `agreement` compute the rows, `text` and `page` show them.
"""
