"""Measurements: one module a benchmark, each prints a table and writes JSON."""
