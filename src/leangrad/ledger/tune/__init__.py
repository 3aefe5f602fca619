"""From step to step towards what the user asked for: a budget of memory, or a bound on the time."""
