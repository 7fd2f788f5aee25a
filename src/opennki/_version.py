"""The one place that holds the version: the build, the command line and the payloads read it."""

__version__ = "0.1.0"
