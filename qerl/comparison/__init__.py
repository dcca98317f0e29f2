"""Arms x seeds: what is compared, and its runs."""
