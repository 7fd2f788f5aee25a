"""Kernels in frameworks."""
