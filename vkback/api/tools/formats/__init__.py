"""One file for each family of formats: its marks, and how its calls are read."""
