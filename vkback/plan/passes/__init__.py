"""Passes of the planner: each rewrites the nodes of a graph. One file a pass."""
