"""Kernel objects: dispatch, argument binding, the NumPy family."""
