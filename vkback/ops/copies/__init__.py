"""Ops that move values: copies, rows, strided boxes, encoding into quantized rows."""
