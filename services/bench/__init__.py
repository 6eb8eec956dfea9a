"""Measurements that ship with the system; each prints a table, or JSON for programs."""
