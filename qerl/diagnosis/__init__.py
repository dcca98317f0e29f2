"""Figures of scored completions and what they mean."""
