"""Exchange of gradients between workers; start with `gradient_exchange`."""
