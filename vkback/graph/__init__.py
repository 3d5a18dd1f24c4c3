"""Graphs of ops: pure data, no GPU."""

from vkback.graph.tensor import Graph, Node, Recipe, Tensor, live, part_name

__all__ = ["Graph", "Node", "Recipe", "Tensor", "live", "part_name"]
