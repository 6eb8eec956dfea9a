"""A whole engine in one thread on a virtual clock, under seeded faults: real scheduler, simulated peers and links."""
