"""Measurements on the test bed; each module is a command: python -m benchmarks.<name> [--json]."""
