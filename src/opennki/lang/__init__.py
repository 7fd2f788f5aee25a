"""What the dialects share: tensors, indices, loops, operations."""
