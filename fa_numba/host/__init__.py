"""From a call to its launches: arrays, binding of arguments, plans, and what is kept of them."""
