"""Tracing a kernel function into IR."""
