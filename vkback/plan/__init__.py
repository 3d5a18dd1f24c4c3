"""Planning: from a graph to a schedule of dispatches for one device. Pure functions, no GPU."""
