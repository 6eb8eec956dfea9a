"""The GPU engine's parts. Not yet run on a GPU: docs/gpu-engine.md says what is proven, and how."""
