"""Tools around the package: the instruction reference, script running, stubs."""
