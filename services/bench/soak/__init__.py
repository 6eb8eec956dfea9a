"""`signalbox bench soak`: clients that come, cancel and vanish at random, and what the services hold afterwards."""
