"""Benchmarks of zero_infinity: run by `python -m benchmarks NAME` and the make targets, not part of the wheel.

They may import the library; the library never imports them.
"""
