"""Compares two ways of computing a training step from the same state.

In: a model, an optimizer and the tensors that a step changes. Out: measured differences between gradients, as plain
numbers that `guard.agreement` judges. The engine and attached scripts use the same comparison.
"""
