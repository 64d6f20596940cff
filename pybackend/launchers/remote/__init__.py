"""What gangs on other hosts have in common, whoever starts them."""
