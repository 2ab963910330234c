"""Benchmarks: `python -m voxlite.bench.load_test` and others. See README.md."""
