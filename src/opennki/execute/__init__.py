"""The native executor: kernels lowered to a tape that precompiled C runs."""
