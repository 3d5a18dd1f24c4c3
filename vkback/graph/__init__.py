"""Graphs of ops: pure data, no GPU."""

from vkback.graph.cut import Part, crossing, cuttable
from vkback.graph.tensor import Graph, Node, Recipe, Tensor, live, part_name

__all__ = ["Graph", "Node", "Part", "Recipe", "Tensor", "crossing", "cuttable", "live", "part_name"]
