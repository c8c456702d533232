"""The same training script, written for each system that `bench peers` and `bench capacity` compare.

`plain.py` is the script; every other file is that script with what its system asks for, as its documentation says, and
nothing else, so that the number of lines that differ can be counted. `turns.py` is what all of them import.
"""
