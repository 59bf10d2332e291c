"""What all reports share: formatting of numbers, rows, text layout, SVG shapes and the page templates.

In: plain values and records. Out: strings, rows of text and SVG fragments, escaped for their output format. Units,
signs and the word for an unknown value are decided here, so that all reports agree.
"""
