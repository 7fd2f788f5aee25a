"""`neuronxcc.kra.profile_lib`: latency of a NEFF."""

from __future__ import annotations

from opennki.dialects.neuronxcc._missing import missing
from opennki.toolchain.bench import BenchmarkResult, NCLatency, NeuronBench

__all__ = ["BenchmarkResult", "NCLatency", "NeuronBench"]
__getattr__ = missing("neuronxcc.kra.profile_lib")
