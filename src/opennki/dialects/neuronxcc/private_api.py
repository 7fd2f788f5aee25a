"""`neuronxcc.nki._private.private_api`: undocumented functions that public kernels call.

Source: calls in public kernels (api_legacy neuronxcc.nki._private.private_api).
"""

from __future__ import annotations

from typing import Any

from opennki.dialects.neuronxcc._later import later
from opennki.dialects.neuronxcc._missing import missing
from opennki.lang.create import ndarray
from opennki.lang.emit import call
from opennki.lang.loops import do_while
from opennki.lang.tensor import Tensor

_M = "neuronxcc.nki._private.private_api"


def core_barrier(tensor: Any, cores: Any) -> None:
    """Wait until the programs on all listed cores have come here; what they stored to `tensor` before is seen
    by all after it.

    tensor: a shared_hbm tensor that the cores wrote parts of. cores: physical cores of a logical NeuronCore,
    as in (0, 1).
    """
    call("core_barrier", (), {"cores": tuple(cores)})


def sendrecv(send_to_rank: Any, recv_from_rank: Any, src: Any, dst: Any, pipe_id: Any = 0, mask: Any = None) -> None:
    """Send src to one core of the logical NeuronCore and receive dst from another.

    send_to_rank, recv_from_rank: programs of the launch grid, which may be expressions of nl.program_id. dst, src: tensors of one shape
    and dtype. pipe_id: exchanges of different pipes do not meet.
    """
    call("core_sendrecv", (), {"send_to_rank": send_to_rank, "recv_from_rank": recv_from_rank, "src": src, "dst": dst, "pipe_id": pipe_id,
                               "mask": mask})  # fmt: skip


row_tiled_mm_kernel = later(_M, "row_tiled_mm_kernel", "Matrix multiplication, tiled by rows.")
column_tiled_mm_kernel = later(_M, "column_tiled_mm_kernel", "Matrix multiplication, tiled by columns.")


def cc_div(numerator: Any, num_channels: int, replica_groups: Any = ()) -> Tensor:
    """The position in its group of the rank whose data this one holds at step numerator // num_channels of a ring of
    collective_permute_implicit: its own position at step 0, that of its predecessor at step 1.

    numerator: the step times num_channels, and the channel; may be an expression of loop indices. num_channels: the channels of the ring.
    replica_groups: lists of ranks of one size, none for all ranks. Returns an int32 tile (1, 1) in SBUF, which indexes a tensor.
    """
    dst = ndarray((1, 1), dtype="int32", buffer="sbuf")
    call("rank_ring_place", (), {"dst": dst, "steps": numerator, "per_step": num_channels, "replica_groups": replica_groups})
    return dst


__all__ = ["cc_div", "column_tiled_mm_kernel", "core_barrier", "do_while", "row_tiled_mm_kernel", "sendrecv"]
__getattr__ = missing(_M)
