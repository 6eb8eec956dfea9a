"""Tensor parallelism: the ranks of a group share one worker's model, each with its part of every matrix.

Rank 0 leads: it alone knows the batch and the scheduler, tells the others each step's columns, and samples.
"""
