"""Pages about runs: reading run folders, numbers with intervals, charts, one self-contained HTML file."""
