"""The tables of README.md and docs/numbers.md, made from the results that benchmarks wrote."""
