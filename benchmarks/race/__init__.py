"""Contenders in turn over the same WAL: python -m benchmarks.race (make bench)."""
