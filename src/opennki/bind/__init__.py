"""Where frameworks meet kernels: the handlers that run a kernel's payload inside a framework's program.

`xla_ffi` is XLA's side of it, with no framework imported; `fpmode` keeps the floating-point mode of the
threads that XLA lends us; `failures` carries a kernel's exception through XLA's text-only errors.
"""
