"""Reports of a sweep over world sizes and of predictions.

In: the points of a sweep or stored runs under a root folder. Out: plots, CSV, LaTeX, text and a page (section 5 of
the contract), and the table of `frameworm predict`. Plots need matplotlib, which is imported late.
"""
