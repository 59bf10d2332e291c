"""Two ways of computing a training step, compared from the same state.

In: a model, an optimizer and the tensors that a step changes. Out: measurements of how far apart two gradients are, as
plain numbers that `guard.agreement` judges. The engine and scripts of others use the same comparison.
"""
