"""opennki: an open implementation of the Neuron Kernel Interface (NKI)."""

from opennki._version import __version__

__all__ = ["__version__"]
