"""Reports of one training run: the summary, the HTML page, its charts, the progress display, a trace as text.

In: a `RunRecord`, its series of steps and samples of the machine. Out: `summary.txt`, `report.html` and terminal
output.
"""
