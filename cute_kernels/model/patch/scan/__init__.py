"""Facts about a module, read from its class, its code and its configuration."""
