"""Settings: the pieces of the schema, its flags, files and presets, and messages about other trainers' names."""
