"""The public ops: one file each, with the whole contract.

An op checks its arguments, picks an implementation (`dispatch.py`) and calls it. The maths is in
`reference/`, the speed in `triton/`.
"""
