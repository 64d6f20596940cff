"""The core: everything between a call and the model that comes back."""
