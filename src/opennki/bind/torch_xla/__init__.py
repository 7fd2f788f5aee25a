"""NKI kernels in PyTorch/XLA programs: the custom call, and what runs it on the CPU.

Importing this package imports torch_xla; `hlo` imports no framework. Source: seeds "PyTorch-XLA bridge".
"""
