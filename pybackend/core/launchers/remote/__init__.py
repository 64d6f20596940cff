"""Worker groups on other hosts, for all launchers that start them."""
