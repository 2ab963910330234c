"""Benchmarks: run from the project's folder, as `python -m bench.load_test`. See README.md."""
