"""What a plan costs, before any device has run it: operations, bytes, lifetimes, a forecast of times."""
