"""What a run needs before it starts: bytes, the sizes that fit, a rough time."""
