"""The model store: which models this machine has, and how they come and go."""
