"""The same training script, written for each system that the benchmarks `peers` and `capacity` compare.

`plain.py` is the script. Every other file is that script plus what its system's documentation asks for and nothing
else, so that the changed lines can be counted.
"""
