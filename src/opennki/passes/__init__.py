"""Passes over the Kernel IR: pure functions that analyse a kernel, rewrite it, or decide where and in what order it runs."""
