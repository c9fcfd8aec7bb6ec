"""IEEE arithmetic for the CPU backends."""
