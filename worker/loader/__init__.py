"""Model files: what a checkpoint on disk is, checked and mapped, without torch."""
