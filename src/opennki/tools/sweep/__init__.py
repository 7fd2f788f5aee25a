"""`opennki sweep`: one kernel for many shapes, dtypes, targets and tuning parameters.

`plan` makes the points, `pool` runs them in worker processes (`worker`) of this machine or of a Ray cluster, `store` keeps what is done,
`tables` writes CSV, Parquet and a plot, `run` puts it together.
"""
