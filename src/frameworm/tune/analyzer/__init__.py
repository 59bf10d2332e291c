"""`BottleneckAnalyzer` and its measuring helpers: short experiments with the real step.

In: a model and a loader, or a config. Out: times of compute, communication, data and memory, and findings by the same
rules as everywhere. Model, optimizer, random state and loader are restored afterwards (`untouched`).
"""
