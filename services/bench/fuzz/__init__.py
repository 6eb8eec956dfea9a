"""`signalbox bench fuzz`: random and mutated frames and bodies against everything that reads bytes from outside."""
