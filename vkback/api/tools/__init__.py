"""Tools: functions that a model may call. How each family of models writes calls, and how they are read, forced, and put into templates."""
