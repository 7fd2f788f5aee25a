"""How large a kernel may be: what is read from a file or a payload is held to it before it runs."""

from __future__ import annotations

import math

from opennki.ir.nodes import Alloc, Kernel, statements
from opennki.ir.text import tensor_name
from opennki.isa import dtypes

MAX_TENSOR_BYTES = 1 << 39
"""Most bytes of all tensors of a kernel together; no chip has as much memory."""
MAX_PROGRAMS = 1 << 22
"""Most programs of a launch grid."""


def too_large(kernel: Kernel) -> tuple[str, str] | None:
    """What is too large about a kernel, and the rule that it breaks; None for a kernel that may run."""
    programs = math.prod(v.hi + 1 for v in kernel.grid)
    if programs > MAX_PROGRAMS:
        return f"its grid has {programs} programs", f"a launch grid has at most {MAX_PROGRAMS} programs"
    local = dict.fromkeys(s for s in statements(kernel.body) if isinstance(s, Alloc))
    total = 0
    for alloc in dict.fromkeys((*kernel.params, *kernel.constant_allocs, *local)):
        size = alloc.size * dtypes.itemsize(alloc.dtype)
        total += size
        if total > MAX_TENSOR_BYTES:
            name = ascii(alloc.name)[1:-1] or tensor_name(alloc.id)
            return (f"its tensors have more than {MAX_TENSOR_BYTES} bytes ({name} alone has {size})",
                    f"the tensors of a kernel have at most {MAX_TENSOR_BYTES} bytes together")
    return None
