"""`BottleneckAnalyzer` and the small measuring helpers beside it: short experiments with the real step.

In: a model and a loader, or a config. Out: times of compute, communication, data and memory, and findings by the same
rules as everywhere. Model, optimizer, random state and loader are left as they were found (`untouched`).
"""
