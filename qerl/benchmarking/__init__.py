"""Measuring speed: models of random weights, the arms that are compared, processes to run them in (docs/performance.md)."""
