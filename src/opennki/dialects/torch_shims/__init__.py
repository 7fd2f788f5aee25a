"""What torch drivers of NKI tutorials import, on CPU tensors, where torch_xla and torch_neuronx are not installed.

`torch_xla.core.xla_model.xla_device()` is the CPU and `mark_step()` has nothing to wait for: kernels run when they are called.
The real packages win where they are installed. Source: reference corpora_public "What harnesses expect".
"""
