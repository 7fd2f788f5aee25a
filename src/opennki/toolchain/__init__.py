"""From a traced kernel to files, and back: the compiler driver, NEFF and NTFF files, the runtime, the profiler.

The parts, in the order in which a call of a kernel on NumPy arrays uses them: `invoke` (the compiler as a command, its cache),
`neuronx_cc` (that command), `compile` (what it does), `neff` (the file that it writes), `nrt` (locks a virtual core, loads and runs a
NEFF), `bench` and `profiler` (latency, NTFF files). docs/toolchain.md describes the tools, docs/neff.md and docs/ntff.md the files.
"""

NEFF_NAME = "file.neff"
"""Name of the file that the compiler writes."""
