"""What a module computes, read from its class, its code and its configuration."""
