"""The servers that `signalbox bench serve` compares: ours and, each in its own environment, the others."""
