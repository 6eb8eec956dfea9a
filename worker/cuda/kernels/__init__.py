"""Triton kernels, one family to a file, each with the function that launches it.

Rules: sums and softmax in float32; masked lanes are selected, never multiplied by zero; what changes from step to step
(lengths, numbers of rows) is read from memory or exempt from specialisation, so that serving never compiles.
"""
