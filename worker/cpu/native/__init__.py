"""The CPU engine in native code: a recorded program of kernels, launched with one call for each step."""
