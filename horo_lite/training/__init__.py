"""Gradients on their way: which bucket, when it leaves, and the optimizers around it."""
